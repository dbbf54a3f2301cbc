"""The GPU benchmark runs where there is none, so that it does not rot until there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import gpu_arms, gpu_ceilings, gpu_longest, gpu_profile, gpu_table
from tests.support.messages import shows

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks/gpu.py"
FILLED = {
    "ceilings": ("copy ", "x W^T ", "dy W ", "dy^T x ", "flash ", "ceiling "),
    "mesh, saving": ("save ", "load ", "raw write ", "first stall ", "; stall ", "beside it"),
    **{
        f"longest in {size} GB": ("predicted 64", "ran 96")  # as far as a tiny search goes
        for size in (24, 48, 80)
    },
}
"""What stands in the last column of arms that have no step of their own."""
UNPLANNED = ("ceilings", "bare FSDP2", "bare FSDP2, compiled", "Trainer", "Trainer + PEFT")


def rows_of(page: Path) -> dict[str, dict[str, str]]:
    """The rows of a table by arm, with their cells by column."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[1]: dict(zip(cells[0], row, strict=True)) for row in cells[2:]}


def smoke(page: Path, *arms: str) -> dict[str, dict[str, str]]:
    command = [sys.executable, SCRIPT, "--smoke", "--output", page, "--arms", *arms]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stderr
    return rows_of(page)


@pytest.mark.more
@pytest.mark.parametrize("arm", gpu_arms.ARMS)
def test_it_makes_its_table_at_tiny_size(tmp_path, arm):
    row = smoke(tmp_path / "gpu.md", arm)[arm]
    besides = row["besides"]
    if "float8" in arm and find_spec("torchao") is None:
        shows(besides, "left out", "torchao")
        return
    assert all(word in besides for word in FILLED.get(arm, ())), row
    if arm not in FILLED:
        assert float(row["step (ms)"]) > 0 and float(row["in one interval (ms)"]) > 0, row
    assert not any(word in besides for word in ("failed", "stopped", "left out")), row
    planned = arm not in UNPLANNED and not arm.startswith("longest")
    assert float(row["planned (GiB)"]) > 0 if planned else row["planned (GiB)"] == "-", row
    if arm == "mesh, compiled":
        page = (tmp_path / "gpu.md").read_text()
        assert all(f"{name} " in page for name in gpu_profile.CLASSES), page


@pytest.mark.more
def test_a_row_after_the_ceilings_has_its_share_of_them(tmp_path):
    rows = smoke(tmp_path / "gpu.md", "mesh", "ceilings")
    assert [*rows] == ["ceilings", "mesh"]
    assert rows["mesh"]["of the ceiling"].endswith("%")


def test_a_row_has_the_certificate_of_exactly_its_config(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_arms, "RESULTS", tmp_path / "certificates.json")
    shared = gpu_arms.json_of("tiny", 1, smoke=False)
    configs = []
    for name in ("here", "there"):  # an adapter's base is in another folder in each run
        (tmp_path / name).mkdir()
        configs.append(gpu_arms.own_json("mesh, LoRA", shared, tmp_path / name))
    assert gpu_arms.certified(configs[0]) == {}
    digest = gpu_arms.digest_of(configs[0])
    found = {digest: {"passed": True, "commit": "0123abcd"}}
    gpu_arms.RESULTS.write_text(json.dumps(found))
    proof = gpu_arms.certified(configs[1])
    line = gpu_table.line({"shape": "tiny", "arm": "mesh, LoRA", **proof})
    assert "PASS" in line and "0123abcd" in line
    assert gpu_arms.certified({**configs[1], "gradient_clipping": 0.5}) == {}


@pytest.mark.more
def test_a_config_of_the_kit_is_certified(tmp_path):
    from benchmarks.gpu_certificates import certify

    config = gpu_arms.own_json("mesh", gpu_arms.json_of("tiny", 1, smoke=True), tmp_path)
    result = certify(config, 1, tmp_path)
    assert result["passed"] and "ZeRO-1" in str(result["layout"])


def test_a_shape_takes_ten_minutes_by_default():
    usual = [gpu_arms.ARMS[arm] for arm in gpu_arms.USUAL]
    assert sum(arm.seconds for arm in usual) + gpu_arms.PLANNING <= 600
    assert gpu_arms.USUAL[0] == gpu_arms.CEILINGS and gpu_arms.USUAL[-1] == gpu_arms.AGAIN
    assert gpu_arms.ARMS[gpu_arms.AGAIN].own == gpu_arms.ARMS[gpu_arms.PROFILED].own


@pytest.mark.parametrize("shape", ["1B", "8B", "Qwen3-0.6B"])
def test_the_sizes_of_a_shape_are_those_of_its_model(shape):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = gpu_arms.SHAPES[shape]
    values = {name: value for name, value in config.items() if name != "model_type"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    assert type(model).__name__ == gpu_arms.ARCHITECTURES[config["model_type"]]
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    shapes = sorted(tuple(module.weight.shape) for module in linear)
    sizes = gpu_ceilings.Sizes.of(config, sum(p.numel() for p in model.parameters()))
    assert sorted(sizes.matrices.elements()) == shapes


def test_a_ceiling_is_the_sum_of_its_parts():
    sizes = gpu_ceilings.Sizes(
        hidden=4,
        intermediate=8,
        layers=3,
        heads=2,
        kv_heads=1,
        head_size=2,
        vocabulary=10,
        parameters=100,
    )
    layer = 2 * 10 * 4 + 2 * 4 * 4 + 16 * 8 + 8 * (4 + 2)
    moved = 5 * (3 * layer + 8 * 10)
    assert sizes.bytes_of(5, frozen=True) == pytest.approx(moved)
    assert sizes.bytes_of(5, frozen=False) == pytest.approx(moved + 38 * 100)
    products = {"x W^T": 1.0, "dy W": 2.0, "dy^T x": 4.0}
    rates = gpu_ceilings.Rates(bandwidth=1000.0, products=products, attention=0.5)
    whole = gpu_ceilings.ceiling(rates, sizes, 5)
    assert whole == pytest.approx(5 / (7 + 1.5 + (moved + 3800) / 1000))
    frozen = gpu_ceilings.ceiling(rates, sizes, 5, frozen=True)
    assert frozen == pytest.approx(5 / (3 + 1.5 + moved / 1000))


KERNELS = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "products",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16>": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int>": "products",
    "triton_tem_fused_mm_3": "products",
    "aten::mm": "products",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>": "attention",
    "fmha_cutlassB_bf16_aligned_64x64_k64_sm80": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "triton_red_fused__to_copy_add_amax_arange_bitwise_and_clamp_min_eq_exp_gather_log_0": "loss",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>": "loss",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0": "norm and elementwise",
    "triton_poi_fused__scaled_dot_product_cudnn_attention_add_mul_3": "norm and elementwise",
    "triton_poi_fused__unsafe_view_mul_silu_3": "norm and elementwise",
    "void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>": "norm and elementwise",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>": "copies",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<uint4>": "copies",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "gloo:all_reduce": "collectives",
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>": "optimizer",
    "void at::native::multi_tensor_apply_kernel<LpNormFunctor<float>>": "optimizer",
    "aten::_fused_adamw_": "optimizer",
    "void a_kernel_of_its_own()": "other",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_a_class_by_its_name(name):
    assert gpu_profile.class_of(name) == KERNELS[name]


def test_a_profile_has_all_classes():
    totals = gpu_profile.by_class([("aten::mm", 2.0), ("aten::mm", 1.0), ("nccl", 4.0)])
    assert [*totals] == [*gpu_profile.CLASSES] and len(totals) == 8
    assert totals["products"] == 3 and totals["collectives"] == 4 and sum(totals.values()) == 7


@pytest.mark.parametrize("room", [10, 1_000, 2_048, 50_000, 131_072, 400_000, 10**7])
@pytest.mark.parametrize("curved", [0.0, 1e-6])
def test_the_longest_sequence_is_searched_by_few_plans(room, curved):
    tried = []

    def needed(tokens: int) -> float:
        tried.append(tokens)
        return 500 + tokens + curved * tokens**2

    lengths = (2_048, 8_192, 2**20)
    result = gpu_longest.longest(needed, room, lengths, 128)
    assert result % 128 == 0
    if result:
        assert needed(result) <= room
    closer = max(128, int(gpu_longest.CLOSE * result) + 128)
    assert result == 2**20 or needed(result + closer) > room
    assert len(tried) <= 12


def test_an_adapter_is_compared_with_the_ceiling_without_gradients_of_weights():
    ceilings = [{"ceiling": 100.0, "frozen_ceiling": 150.0}]
    row = {"shape": "8B", "tokens": 75.0}
    assert gpu_table.of_ceiling(row | {"arm": "mesh"}, ceilings) == {"share": 0.75}
    assert gpu_table.of_ceiling(row | {"arm": "mesh, LoRA"}, ceilings) == {"share": 0.5}
    assert gpu_table.of_ceiling(row | {"arm": "mesh"}, []) == {}
