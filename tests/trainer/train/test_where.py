"""Where a traced step went: classes of kernels, intervals that add up, the distance to the card's ceiling."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.support.ranks import run_ranks
from tests.support.tiny import tiny_decoder
from tests.support.trainings import build
from trainer.dist import Dist
from trainer.metrics.flops import sustained_flops
from trainer.metrics.log import MetricsLog, Record
from trainer.models.float8 import use_float8, uses_float8
from trainer.profile.trace import step_watchers, where_it_went
from trainer.profile.where import (
    CLASSES,
    COMMUNICATION,
    GAPS,
    REST,
    Event,
    ceiling_of,
    class_of_kernel,
    class_of_operator,
    where_kernels_went,
    where_operators_went,
)
from trainer.train import loop

GEMM, NCCL, ADAM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "ncclDevKernel_AllGather_RING_LL(...)", "FusedAdam"
POINTWISE = "triton_poi_fused__to_copy_mul_silu_3"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (GEMM, "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_", "products"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::k", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>(...)", "products"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn", "products"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::b", "attention"),
        ("triton_tem_fused_flex_attention_backward_0", "attention"),
        ("triton_tem_fused_mm_12", "products"),
        ("softmax_gradient", "loss"),
        ("triton_red_fused__log_softmax_nll_loss_forward_1", "loss"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, float>", "loss"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
         "namespace)::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4,", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, "
         "LpNormFunctor<float, (at::native::NormType)1, float", "optimizer"),
        ("void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float, float>", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<2>, "
         "CopyFunctor<c10::BFloat16, float, 2, 1, 1>, Copy<c10::BFloat16, float> >", "copies"),
        ("at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **, char **, long", "copies"),
        ("void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(T2 **, T1 *, long *, long", "copies"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::(an", "copies"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        (POINTWISE, REST),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_view_2", REST),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::arr", REST),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2", REST),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
    ],
)  # fmt: skip
def test_kernels_of_an_h100_are_told_by_their_names(name, kind):
    assert class_of_kernel(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::addmm", "products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("aten::_log_softmax", "loss"),
        ("gloo:all_reduce", COMMUNICATION),
        ("MmBackward0", REST),
    ],
)
def test_operators_of_a_cpu_are_told_by_their_names(name, kind):
    assert class_of_operator(name) == kind


# --- intervals --------------------------------------------------------------------------------------------------------


def test_step_by_hand_adds_up_to_its_span():
    time = where_kernels_went(
        [
            Event(GEMM, 1000, 11000, 7),
            Event(NCCL, 6000, 21000, 13),  # 5 ms behind the product, 2 behind the pointwise kernel
            Event(POINTWISE, 13000, 15000, 7),
            Event(ADAM, 26000, 31000, 7),
        ]
    )
    assert time.span_ms == 30
    assert {share.name: share.ms for share in time.shares if share.ms} == {
        "products": 10,
        "optimizer": 5,
        REST: 2,
        COMMUNICATION: 8,
        GAPS: 5,
    }
    assert time.of(COMMUNICATION).hidden_ms == 7
    assert time.percent(GAPS) == pytest.approx(100 / 6)


def test_compute_on_two_streams_counts_once():
    time = where_kernels_went(
        [Event(GEMM, 0, 4000, 7), Event(GEMM, 2000, 5000, 8), Event("Memcpy DtoD", 1000, 6000, 9)]
    )
    assert [(time.of(name).ms, time.of(name).calls) for name in ("products", "copies")] == [(5, 2), (1, 1)]
    assert time.of("copies").hidden_ms == 4


def test_operator_within_another_counts_where_it_belongs():
    events = [("MmBackward0", 0, 9), ("aten::mm", 2, 8), ("Optimizer.step#SGD", 12, 20), ("aten::mul_", 13, 19)]
    time = where_operators_went([Event(name, 1e3 * start, 1e3 * end) for name, start, end in events])
    assert [time.of(name).ms for name in ("products", "optimizer", REST, GAPS)] == [6, 8, 3, 3]


MOMENTS = st.tuples(st.sampled_from([GEMM, NCCL, ADAM, POINTWISE]), st.integers(0, 40), st.integers(1, 15))


@given(st.lists(MOMENTS, min_size=1, max_size=12))
def test_rows_are_what_counting_each_moment_gives(moments):
    running = [{class_of_kernel(n) for n, start, size in moments if start <= t < start + size} for t in range(60)]
    first, last = min(s for _, s, _ in moments), max(s + size for _, s, size in moments)
    time = where_kernels_went(Event(name, 1e3 * start, 1e3 * (start + size)) for name, start, size in moments)
    owners = [next((kind for kind in CLASSES if kind in kinds), GAPS) for kinds in running[first:last]]
    for share in time.shares:
        assert share.ms == owners.count(share.name)
        assert share.ms + share.hidden_ms == sum(share.name in kinds for kinds in running) or share.name == GAPS
    assert sum(share.ms for share in time.shares) == time.span_ms == last - first


def test_step_without_any_kernel_is_a_table_of_zeros():
    time = where_kernels_went([])
    assert time.span_ms == 0
    assert time.lines()[-1].split() == ["the", "step", "0.00", "0.0"]


# --- the table --------------------------------------------------------------------------------------------------------


def layer(start_us: float) -> list[Event]:
    """A block of a 7B model with the copies and collectives of FSDP around it, about as an H100 shows it."""
    flash = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0"
    copy_out = "at::native::detail::split_with_sizes_copy_out_contiguous_no_cast_kernel(char **, char **, long *)"
    kernels = [
        (copy_out, 400, 7),
        (GEMM, 1000, 7),
        (flash, 900, 7),
        (GEMM, 700, 7),
        (POINTWISE, 300, 7),
        (GEMM, 5600, 7),
    ]
    events = [
        Event("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", start_us + 500, start_us + 1700, 13)
    ]
    for name, us, stream in kernels:
        events.append(Event(name, start_us, start_us + us, stream))
        start_us += us
    return events


def test_table_of_a_few_blocks_reads_as_it_should():
    time = where_kernels_went([e for n in range(3) for e in layer(9000 * n)] + [Event(NCCL, 26900, 27900, 13)])
    assert time.lines() == [
        "                                  ms      %    kernels   hidden ms",
        "products                       21.90   78.5          9        0.00",
        "attention                       2.70    9.7          3        0.00",
        "loss                            0.00    0.0          0        0.00",
        "optimizer                       0.00    0.0          0        0.00",
        "copies                          1.20    4.3          3        0.00",
        "elementwise and the rest        0.90    3.2          3        0.00",
        "communication, exposed          1.00    3.6          4        3.60",
        "gaps                            0.20    0.7",
        "the step                       27.90  100.0",
    ]


def test_ceiling_of_a_7b_step_is_reckoned_from_its_products():
    """526 ms of products in a step of 755 ms: measured on four H100."""
    us = 1e3
    time = where_kernels_went(
        [Event(GEMM, 0, 526 * us), Event(POINTWISE, 526 * us, 701 * us), Event(NCCL, 731 * us, 755 * us)]
    )
    ceiling = ceiling_of(time, products=347.5e12, attention=40.5e12, peak_flops=989e12, sustained_flops=685e12)
    assert ceiling is not None
    assert ceiling.line() == (
        "products at 661 of 685 TFLOP/s that the card sustains, MFU 52.0 %; without the 4.0 % gaps and 3.2 % exposed "
        "communication it would be 56.0 %"
    )


@pytest.mark.parametrize(("card", "rate"), [("NVIDIA H100 80GB HBM3", 685e12), ("NVIDIA A100-SXM4-40GB", None)])
def test_ceiling_is_known_of_measured_cards_only(card, rate):
    assert sustained_flops(card) == rate


def test_float8_is_seen_in_a_wrapped_model_so_that_no_bf16_ceiling_is_told():
    pytest.importorskip("torchao")
    decoder = tiny_decoder()
    wrapped = nn.ModuleList([decoder])
    assert not uses_float8(wrapped)
    use_float8(decoder, emulate=True)
    assert uses_float8(wrapped)


# --- the profiler -----------------------------------------------------------------------------------------------------


def device_event(name: str, *, is_annotation: bool = False, kind: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=kind,
        time_range=SimpleNamespace(start=0.0, end=1000.0),
        device_resource_id=7,
        is_user_annotation=is_annotation,
    )


def test_only_work_on_the_device_counts_as_its_events():
    events = [
        device_event(GEMM),
        device_event("aten::mm", kind=DeviceType.CPU),
        device_event("nccl:_all_gather_base", is_annotation=True),
        device_event("Optimizer.step#AdamW.step", is_annotation=True),
        device_event("Stream Wait Event"),
        device_event("Event Sync"),
    ]
    time = where_it_went(SimpleNamespace(events=lambda: events), on_gpu=True)
    assert sum(share.calls for share in time.shares) == time.of("products").calls == 1


def test_stretch_that_somebody_named_is_no_operator():
    x = torch.ones(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("a stretch"):
        x @ x
    time = where_it_went(profiler, on_gpu=False)
    assert time.of("products").calls == 1
    assert time.of("products").ms > 0
    assert "a stretch" in {event.name for event in profiler.events()}
    assert sum(share.calls for share in time.shares) == len(profiler.events()) - 1


def test_named_step_leaves_a_table_in_log_and_files(rows, tmp_path, capsys):
    loop.train(build(rows, tmp_path, steps=2, profile_steps=[2]), watchers=step_watchers)
    text = (tmp_path / "profile" / "step_000002_rank_0.txt").read_text()
    assert text.startswith("where step 2 of rank 0 went, by operator, as there is no device:\n")
    assert text in capsys.readouterr().out
    tree = json.loads((tmp_path / "profile" / "step_000002_rank_0.json").read_text())
    assert sum(share["ms"] for share in tree["shares"]) == pytest.approx(tree["span_ms"])
    working = {share["name"] for share in tree["shares"] if share["calls"]}
    assert working >= {"products", "attention", "loss", "optimizer"}
    assert (tree["ceiling"], tree["compiled"]) == (None, 0)


class SlowDisk(MetricsLog):
    """Keeps the steps' seconds, and takes its time over each file that was written."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Path(), total_steps=3, enabled=False)
        self.step_s: list[float] = []
        self._seconds = seconds

    def train(self, record: Record) -> None:
        self.step_s.append(record["step_s"])

    def note(self, text: str) -> None:
        if text.startswith("wrote "):
            time.sleep(self._seconds)


def seconds_of_steps(dist: Dist, rows: str, run_dir: str) -> list[float]:
    run = build(rows, Path(run_dir), dist, backend="ddp", steps=3, eval_every=0, profile_steps=[2])
    run.log = SlowDisk(FILE_S if dist.rank else FILE_S / 2)
    loop.train(run, watchers=step_watchers)
    return run.log.step_s


FILE_S = 2.0


def test_time_of_steps_is_without_that_of_writing_a_trace_on_any_rank(rows, tmp_path):
    for seconds in run_ranks(seconds_of_steps, 2, rows, str(tmp_path)):
        assert len(seconds) == 3
        assert max(seconds[1:]) < FILE_S  # the first step sets things up


def test_traced_step_that_compiles_says_so(rows, tmp_path):
    run = build(rows, tmp_path, steps=2, profile_steps=[1])
    run = replace(run, loss_fn=compiling(run.loss_fn))
    loop.train(run, watchers=step_watchers)
    text = (tmp_path / "profile" / "step_000001_rank_0.txt").read_text()
    assert "note: step 1 includes compilation, of " in text


def compiling(loss_fn):
    double = torch.compile(lambda x: x * 2, backend="eager")

    def call(module: nn.Module, batch):
        if module.training:  # not in the evaluation before the first step
            double(torch.ones(3))
        return loss_fn(module, batch)

    return call
