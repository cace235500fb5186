"""The table of families, checked in as tests/families.json, against what is found today."""

import json

import pytest
import transformers
from families import NAMES, PAGE, TABLE, entry, page

pytestmark = pytest.mark.filterwarnings("ignore")

KNOWN = json.loads(TABLE.read_text())
SOME = ["ernie4_5_moe", "gemma4_text", "llama4_text"]


def test_the_table_is_complete():
    assert list(KNOWN) == NAMES and len(NAMES) >= 40


def test_the_page_is_that_of_the_table():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    assert rows == [line for line in page(KNOWN).splitlines() if line.startswith("|")]


@pytest.mark.parametrize(
    "family", [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_family(family):
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    assert entry(family) == KNOWN[family]
