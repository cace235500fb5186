"""The tables of families, checked in as tests/families-*.json by version of transformers, against what is found."""

import json

import pytest
import transformers
from families import NAMES, PAGE, TABLE, entry, newest, page

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not TABLE.exists(), reason=f"no table for transformers {transformers.__version__}"),
]

KNOWN = json.loads(TABLE.read_text()) if TABLE.exists() else {}
SOME = ["ernie4_5_moe", "gemma4_text", "llama4_text"]


def test_the_table_is_complete():
    assert list(KNOWN) == NAMES and len(NAMES) >= 40


def test_the_page_is_that_of_the_table():
    table = json.loads(newest().read_text())
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert rows == [line for line in page(table).splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    "family", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_family(family):
    assert entry(family) == KNOWN[family]
