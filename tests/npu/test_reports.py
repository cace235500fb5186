"""Public bug reports of other libraries for Ascend, as tests of ours. What they broke on is named in front of each.

Missing flags, event ids (tilelang-ascend#1660, #1824) and casts that lose bits (sgl-kernel-npu#815) are among the
faults of test_mutants.py; a failed build that goes unnoticed (vllm-ascend#3342) and a package that does not depend on
torch_npu are in test_host_path.py; a torch, torch_npu and CANN that do not fit together (MinerU#2537, pytorch#99,
vllm-ascend#117) in the doctor's test in tests/test_jit.py.
"""

import os
import shutil
from pathlib import Path

import calls
import pytest
import torch
from checking import assert_bit_equal
from forking import Child

from torch_deepinfer import ops

pytestmark = calls.needs_standin

BF16 = torch.bfloat16


# These two fork, and come before the others start a device.


# tilelang-ascend#1830: a kernel for the other chip.
def test_kernel_of_another_architecture_is_refused(tmp_path):
    for tool in ("bin", "lib", "include"):
        shutil.copytree(Path(os.environ["ASCEND_HOME_PATH"]) / tool, tmp_path / tool, symlinks=True)
    compiler = tmp_path / "bin" / "bisheng"
    other = 3510 if os.environ.get("DEEPINFER_STANDIN_SOC", "").startswith("Ascend910") else 2201
    wrong = compiler.read_text().replace("arch=${1#--npu-arch=dav-}", f"arch={other}")
    assert wrong != compiler.read_text()
    compiler.write_text(wrong)
    environment = {"DEEPINFER_BISHENG": str(compiler), "DEEPINFER_CACHE_DIR": str(tmp_path / "cache")}
    with pytest.raises(RuntimeError, match=r"ACL error 507035 .*built for another architecture"):
        Child(calls.norm, environment).result()


def _reused_host_buffer() -> tuple[float, float]:
    buffer, other = (torch.ones(64).pin_memory() for _ in range(2))
    waited = other.to("npu", non_blocking=True)
    torch.npu.synchronize()
    other.fill_(5.0)
    copied = buffer.to("npu", non_blocking=True)
    buffer.fill_(5.0)
    return copied.cpu()[0].item(), waited.cpu()[0].item()


# vllm-ascend#16428: a host buffer that is used again before the copy out of it has run.
def test_delayed_streams_show_a_host_buffer_that_is_used_too_early():
    assert Child(_reused_host_buffer, {"DEEPINFER_STANDIN": "delayed"}).result() == (5.0, 1.0)


def _routed_beside_each_other() -> None:
    logits = [torch.randn(4099, 64) for _ in range(3)]
    logits[1][::5] = torch.nan
    given, streams = [x.npu() for x in logits], [torch.npu.Stream() for _ in logits]
    torch.npu.synchronize()
    routed = []
    for x, stream in zip(given, streams, strict=True):
        with torch.npu.stream(stream):
            routed.append(ops.moe_router(x, 8, renormalize=True))
    torch.npu.synchronize()
    for x, (weights, ids) in zip(logits, routed, strict=True):
        expected_weights, expected_ids = ops.moe_router(x, 8, renormalize=True)
        assert_bit_equal(ids, expected_ids)
        calls.close(weights, expected_weights)


# vllm-ascend#15903: the experts of several long prompts at once, on streams of their own.
@pytest.mark.parametrize("mode", ["direct", "delayed"])
def test_routing_on_several_streams(mode):
    Child(_routed_beside_each_other, {"DEEPINFER_STANDIN": mode}).result()


# tilelang-ascend#1304, #1641, #1682: rows that are no multiple of 32 bytes, 4 to 36 bytes long, or 504.
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("columns", [1, 2, 4, 5, 7, 9, 17, 126])
def test_rows_that_are_no_whole_blocks(dtype, columns):
    x, y = (torch.randn(130, columns).to(dtype) for _ in range(2))
    calls.compare(ops.rms_norm, x, None, 1e-5, "none", rtol=2**-7 if dtype != torch.float32 else 1e-6)
    calls.compare(ops.silu_and_mul, x, y, rtol=2**-7 if dtype != torch.float32 else 1e-6)
    calls.compare(ops.moe_permute, x, torch.randperm(130).int(), 1)
    calls.compare(ops.quantize_per_token, x, dtype=torch.int8)
    calls.compare(ops.dequantize, torch.randint(-9, 9, (130, columns)).to(torch.int8), torch.rand(130, 1), [1, -1])


# tilelang-ascend#1717: the tail of a tile of 1024 x 100.
def test_tails():
    calls.compare(ops.silu_and_mul, torch.randn(1024, 100), torch.randn(1024, 100), rtol=1e-6)


# tilelang-ascend#140: offsets beyond 2^31 and 2^32 bytes.
def test_offsets_beyond_32_bits():
    rows, columns, stride = 3, 64, 2**30 + 8
    x = torch.empty_strided((rows, columns), (stride, 1), dtype=BF16, device="npu")
    values = torch.randn(rows, columns).bfloat16()
    for i in range(rows):
        x[i] = values[i].npu()
    weight = torch.rand(columns).bfloat16()
    calls.close(ops.rms_norm(x, weight.npu(), 1e-6), ops.rms_norm(values, weight, 1e-6), 2**-7)
    assert_bit_equal(ops.moe_permute(x, torch.tensor([2, 0, 1]).int().npu(), 1), values[[2, 0, 1]])
    assert_bit_equal(ops.gemm(x, values.npu().t()), ops.gemm(values.npu(), values.npu().t()).cpu())
    assert_bit_equal(ops.gemm(values.npu(), x.t()), ops.gemm(values.npu(), values.npu().t()).cpu())


# tilelang-ascend#140: a product of a depth of 131072.
def test_product_of_a_great_depth():
    a, b = torch.ones(16, 131072).bfloat16(), torch.randint(-1, 2, (48, 131072)).bfloat16()
    assert_bit_equal(ops.gemm(a.npu(), b.npu().t(), out_dtype=torch.float32), (a.double() @ b.double().t()).float())


# sgl-kernel-npu#790, #805: an inner dimension of 16 bytes.
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_sixteen_bytes(rows):
    calls.compare(ops.add_rms_norm, calls.bf16(rows, 8), calls.bf16(rows, 8), calls.bf16(8), 1e-6, rtol=2**-7)
    calls.compare(ops.quantize_per_token, calls.bf16(rows, 8), dtype=torch.int8)


# sgl-kernel-npu#676, #709: indices of the other width; a batch of more than one.
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_both_widths(dtype):
    calls.compare(ops.moe_expert_map, torch.randint(-1, 9, (50, 2), dtype=dtype), 9)
    positions = torch.randint(20, (4, 6, 1), dtype=dtype)
    calls.compare(ops.rotary_embedding, calls.bf16(4, 6, 3, 16), None, calls.bf16(20, 8), calls.bf16(20, 8), positions)


# sglang#28272: 70,218 blocks where a launch takes 65,535.
def test_more_rows_than_a_launch_has_blocks():
    x = torch.randn(70_218, 8)
    calls.close(ops.rms_norm(x.npu(), None, 1e-6, "none"), ops.rms_norm(x, None, 1e-6, "none"))


# vllm-ascend#12733: 64 heads of 192 in bfloat16 overflow the unified buffer; a rotation keeps the norm.
def test_rotation_of_large_heads():
    q, angles = calls.bf16(5, 64, 192), torch.rand(5, 1, 96) * 6
    calls.compare(ops.rotary_embedding, q, None, angles.cos(), angles.sin())
    turned, _ = ops.rotary_embedding(q.npu(), None, angles.cos().npu(), angles.sin().npu())
    torch.testing.assert_close(turned.cpu().float().norm(dim=-1), q.float().norm(dim=-1), rtol=2**-7, atol=0)


# vllm-ascend#14922: indices of 0xa5a5a5a5, out of a buffer that was not filled yet.
def test_garbage_indices_poison_their_rows():
    garbage = torch.tensor([0xA5A5A5A5 - 2**32, 1, 2**31 - 1]).int().npu()
    x = torch.randn(4, 24)
    rows = ops.moe_permute(x.npu(), garbage, 1).cpu()
    assert rows[[0, 2]].isnan().all()
    assert_bit_equal(rows[1], x[1])
    sums = ops.moe_unpermute(x.npu(), garbage[:, None]).cpu()
    assert sums[[0, 2]].isnan().all()
    assert_bit_equal(sums[1], x[1])
    turned, _ = ops.rotary_embedding(x.npu()[:3], None, torch.rand(4, 12).npu(), torch.rand(4, 12).npu(), garbage)
    assert turned.cpu()[[0, 2]].isnan().all() and not turned.cpu()[1].isnan().any()


# vllm-ascend#2757: counting 100,000 inputs runs out of the unified buffer.
@pytest.mark.parametrize("experts", [3, 4096])
def test_map_of_very_many_slots(experts):
    calls.compare(ops.moe_expert_map, torch.randint(-1, experts, (25_000, 4)), experts, alignment=4)
