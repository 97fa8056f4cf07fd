import json
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rackmount_registry.attention import AttentionParams
from rackmount_registry.capabilities import Cell, Demand
from rackmount_registry.descriptors import (
    AttentionBackend,
    ExpertKernel,
    LinearKernel,
    OpSet,
    Requirement,
    TokenDispatcher,
)
from rackmount_registry.errors import PluginError, SelectionError
from rackmount_registry.offers import BrokenPlugin, Offer
from rackmount_registry.plain import as_plain
from rackmount_registry.selection import (
    Refusal,
    choose,
    choose_attention,
    choose_experts,
    choose_ops,
)

OURS = "rackmount-plugins-backends"
CPU = Demand(device="cpu", dtype="float32")
GPU = Demand(device="cuda", dtype="bfloat16", compute_capability=(9, 0))
ON_CPU, ON_GPU = Cell(devices=("cpu",)), Cell(devices=("cuda",))


def offer(cls, name: str, *cells: Cell, band: str = "reference", by: str = OURS, **values):
    part = cls(name=name, factory="m:f", band=band, cells=cells or (Cell(),), **values)
    return Offer(descriptor=part, distribution=by, version="1.0")


def linear(name: str, *cells: Cell, **values) -> Offer[LinearKernel]:
    return offer(LinearKernel, name, *cells, **values)


def attention(
    name: str, *cells: Cell, sizes: tuple[int, ...] = (16,), layout: str = "paged", **values
):
    values |= {"preferred_block_sizes": sizes, "cache_layout": layout}
    return offer(AttentionBackend, name, *cells, **values)


def names(candidates: Sequence[object]) -> list[str]:
    return [candidate.name for candidate in candidates]


def test_auto_goes_by_band_then_measured_order_then_name() -> None:
    offers = [
        linear("a"),
        linear("d", band="vendor", order=2),
        linear("c", band="vendor", order=1),
        linear("b", band="vendor", order=1),
        linear("e", band="portable"),
    ]
    choice = choose("linear_kernel", offers, CPU)
    assert names(choice.candidates) == ["b", "c", "d", "e", "a"]
    assert choice.require() is offers[3]
    assert choice.why == "first of 5 that fit, by band, order and name"


def test_auto_takes_the_best_that_fits_and_keeps_every_refusal() -> None:
    fp8 = Cell(devices=("cuda",), dtypes=("float16",))
    offers = [linear("fast", ON_GPU, fp8, band="vendor"), linear("plain", ON_GPU, ON_CPU)]
    choice = choose("linear_kernel", offers, CPU)
    assert choice.require().name == "plain" and choice.why == "the only one that fits"
    fast, plain = choice.candidates
    assert not fast.accepted and fast.refusals == (
        Refusal(row=0, reasons=("device=cpu is not one of cuda",)),
        Refusal(
            row=1,
            reasons=("device=cpu is not one of cuda", "dtype=float32 is not one of float16"),
        ),
    )
    assert plain.accepted and [refusal.row for refusal in plain.refusals] == [0]


def test_one_whole_row_must_fit() -> None:
    rows = (Cell(devices=("cuda",)), Cell(dtypes=("bfloat16",)))
    split = linear("split", Cell(devices=("cuda",), dtypes=("float16",)), Cell(devices=("cpu",)))
    assert choose("linear_kernel", [split], GPU).winner is None
    assert choose("linear_kernel", [linear("rows", *rows)], GPU).winner is not None


def test_weight_formats_are_a_demand_like_any_other() -> None:
    offers = [
        linear("dense", Cell(weight_formats=("dense",)), band="vendor"),
        linear("int8", Cell(weight_formats=("dense", "int8_rows"))),
    ]
    wanted = Demand(device="cpu", weight_format="int8_rows")
    assert choose("linear_kernel", offers, wanted).require().name == "int8"


def test_an_explicit_choice_is_honoured_over_better_ones() -> None:
    offers = [linear("fast", band="vendor"), linear("plain")]
    choice = choose("linear_kernel", offers, CPU, "plain")
    assert choice.require() is offers[1]
    assert (choice.requested, choice.why) == ("plain", "requested")


def test_an_explicit_choice_that_does_not_fit_is_refused_with_reasons_and_what_would_fit() -> None:
    offers = [linear("fast", ON_GPU, Cell(dtypes=("float16",))), linear("plain"), linear("other")]
    with pytest.raises(SelectionError) as caught:
        choose("linear_kernel", offers, CPU, "fast")
    assert str(caught.value) == (
        f"linear_kernel fast ({OURS} 1.0): row 0: device=cpu is not one of cuda; row 1: "
        "dtype=float32 is not one of float16. Would fit: other, plain"
    )
    assert sorted(names(caught.value.candidates)) == ["fast", "other", "plain"]


def test_auto_without_any_that_fits_says_what_refused_each() -> None:
    choice = choose("linear_kernel", [linear("a", ON_GPU), linear("b", ON_GPU)], CPU)
    assert choice.winner is None
    with pytest.raises(SelectionError, match=r"no linear_kernel fits: a .*row 0.*; b .*row 0"):
        choice.require()
    empty = choose("linear_kernel", [], CPU)
    assert empty.why == "no linear_kernel fits: none is mounted"


def test_a_missing_requirement_refuses_with_the_command_that_brings_it() -> None:
    needs = (Requirement(module="no_such_module", install="pip install such"),)
    offers = [linear("fast", band="vendor", requires=needs), linear("plain")]
    choice = choose("linear_kernel", offers, CPU)
    reason = "module no_such_module is not installed: pip install such"
    assert choice.require().name == "plain"
    assert choice.candidates[0].refusals == (Refusal(row=None, reasons=(reason,)),)
    with pytest.raises(SelectionError, match=reason):
        choose("linear_kernel", offers, CPU, "fast")


def test_an_outside_plugin_enters_auto_only_where_opted_in_but_may_be_asked_for() -> None:
    offers = [linear("theirs", band="vendor", by="acme-kernels"), linear("ours")]
    choice = choose("linear_kernel", offers, CPU)
    assert choice.require().name == "ours"
    assert "not opted in" in str(choice.candidates[0])
    opted = choose("linear_kernel", offers, CPU, opted_in={"acme-kernels"})
    assert opted.require().name == "theirs"
    assert choose("linear_kernel", offers, CPU, "theirs").require().name == "theirs"


def test_a_contested_name_is_no_candidate_of_auto_and_needs_its_distribution() -> None:
    opted_in = {"acme", "bolt"}
    offers = [linear("same", band="vendor", by="acme"), linear("same", by="bolt"), linear("mine")]
    choice = choose("linear_kernel", offers, CPU, opted_in=opted_in)
    assert choice.require().name == "mine"
    assert "bolt offers this name too: ask for acme:same" in str(choice.candidates[0])
    with pytest.raises(SelectionError, match=r"offered by acme 1.0 and bolt 1.0; choose with"):
        choose("linear_kernel", offers, CPU, "same")
    assert choose("linear_kernel", offers, CPU, "bolt:same").require() is offers[1]


def test_an_unknown_name_lists_the_legal_ones_and_the_broken_plugins() -> None:
    broken = BrokenPlugin(distribution="acme", version="2", entry_point="x", error="ImportError: y")
    with pytest.raises(SelectionError) as caught:
        choose("linear_kernel", [linear("torch")], CPU, "troch", broken=[broken])
    for part in ("'troch' (did you mean 'torch'?)", "mounted: torch", "acme 2 (ImportError: y)"):
        assert part in str(caught.value)


def test_each_operation_is_resolved_by_itself() -> None:
    offers = [
        offer(OpSet, "torch", ops=("norm", "rotary", "route")),
        offer(OpSet, "triton", ON_GPU, band="portable", ops=("norm", "rotary")),
    ]
    chosen = choose_ops(offers, GPU, ("norm", "route"))
    assert {op: choice.require().name for op, choice in chosen.items()} == {
        "norm": "triton",
        "route": "torch",
    }
    assert choose_ops(offers, CPU, ("norm",))["norm"].require().name == "torch"
    assert choose_ops(offers, CPU, ("sample",))["sample"].winner is None


def test_a_requested_op_set_serves_what_it_offers_and_auto_the_rest() -> None:
    offers = [
        offer(OpSet, "torch", ops=("norm", "route")),
        offer(OpSet, "triton", ON_GPU, ops=("norm",), order=1),
    ]
    chosen = choose_ops(offers, GPU, ("norm", "route"), "triton")
    assert chosen["norm"].require().name == "triton"
    assert chosen["route"].require().name == "torch"
    assert chosen["route"].why == "triton does not offer it; the only one that fits"
    with pytest.raises(SelectionError, match=r"op_set triton .*device=cpu"):
        choose_ops(offers, CPU, ("norm", "route"), "triton")
    with pytest.raises(SelectionError, match="unknown op_set 'cuda'"):
        choose_ops(offers, CPU, ("norm",), "cuda")


def test_attention_may_pair_two_backends_of_one_layout() -> None:
    prefill = attention("pre", Cell(phases=("prefill",)), band="vendor", sizes=(32, 16))
    decode = attention("dec", Cell(phases=("decode",), block_sizes=(8, 16)), band="vendor")
    torch = attention("torch")
    choice = choose_attention([torch, prefill, decode], CPU)
    assert (choice.prefill, choice.decode) == (prefill, decode)
    assert (choice.block_size, choice.cache_layout) == (16, "paged")
    assert len(choice.candidates) == 9


def test_the_block_size_is_the_first_that_the_prefill_backend_prefers_and_both_take() -> None:
    pre = attention("pre", Cell(phases=("prefill",)), sizes=(64, 32, 16))
    dec = attention("dec", Cell(phases=("decode",), block_sizes=(16, 32)), sizes=(16,))
    assert choose_attention([pre, dec], CPU).block_size == 32
    assert choose_attention([pre, dec], CPU, block_size=16).block_size == 16
    with pytest.raises(SelectionError, match="block_size=128 is not one of 16, 32"):
        choose_attention([pre, dec], CPU, block_size=128)


def test_an_explicit_block_size_need_not_be_a_preferred_one() -> None:
    assert choose_attention([attention("any", sizes=(16,))], CPU, block_size=7).block_size == 7


def test_pairs_that_disagree_say_so() -> None:
    pre = attention("pre", Cell(phases=("prefill",)), sizes=(16,))
    flat = attention("flat", Cell(phases=("decode",)), layout="flat")
    with pytest.raises(SelectionError) as caught:
        choose_attention([pre, flat], CPU)
    assert "pre + flat: cache layouts paged and flat differ" in str(caught.value)
    assert "phase=decode is not one of prefill" in str(caught.value)
    assert len(caught.value.candidates) == 4
    big = attention("big", Cell(phases=("decode",), block_sizes=(256,)), sizes=(256,))
    with pytest.raises(SelectionError, match=r"pre \+ big: no block size of 16 suits both"):
        choose_attention([pre, big], CPU)


def test_of_a_pair_the_slower_band_counts_first() -> None:
    pre = attention("pre", Cell(phases=("prefill",)), band="vendor")
    both, slow = attention("both", band="portable"), attention("slow")
    assert choose_attention([slow, pre, both], CPU).prefill is pre
    assert choose_attention([slow, pre, both], CPU).decode is both
    alone = attention("alone", layout="own", band="portable")
    choice = choose_attention([slow, pre, alone], CPU)
    assert (choice.prefill, choice.decode) == (alone, alone)


def test_a_requested_backend_serves_both_phases_or_is_refused() -> None:
    pre = attention("pre", Cell(phases=("prefill",)), band="vendor")
    torch = attention("torch")
    choice = choose_attention([pre, torch], CPU, "torch")
    assert (choice.prefill, choice.decode, choice.why) == (torch, torch, "requested")
    with pytest.raises(SelectionError) as caught:
        choose_attention([pre, torch], CPU, "pre")
    assert "phase=decode is not one of prefill" in str(caught.value)
    assert "Would fit: torch" in str(caught.value)
    step = attention("step", Cell(phases=("decode",)))
    with pytest.raises(SelectionError, match=r"Would fit: auto$"):
        choose_attention([pre, step], CPU, "pre")


def test_auto_goes_by_the_order_of_each_phase() -> None:
    chunks = attention("chunks", band="vendor", order=1, decode_order=2)
    steps = attention("steps", band="vendor", order=2, decode_order=1)
    choice = choose_attention([steps, chunks], CPU)
    assert (choice.prefill, choice.decode) == (chunks, steps)
    assert choice.why == "first of 4 that fit, by band, order and name"
    assert [f"{pair.first.name} {pair.second.name}" for pair in choice.candidates] == [
        "chunks steps",
        "chunks chunks",
        "steps steps",
        "steps chunks",
    ]


def test_a_backend_without_an_order_at_decode_decodes_only_when_asked_for() -> None:
    chunks = attention("chunks", band="vendor", decode_order=None)
    plain = attention("plain", band="portable", decode_order=9)
    choice = choose_attention([chunks, plain], CPU)
    assert (choice.prefill, choice.decode) == (chunks, plain)
    barred = next(pair for pair in choice.candidates if pair.second.name == "chunks")
    assert "only for decode where it is asked for by name" in str(barred)
    asked = choose_attention([chunks, plain], CPU, "chunks")
    assert (asked.prefill, asked.decode) == (chunks, chunks)


def unless_small(demand: Demand) -> str:
    """A backend's `jit`: kernels for head size 64 are on the disk."""
    return "" if demand.head_size == 64 else f"head size {demand.head_size} is not compiled"


def test_auto_waits_for_no_compiler_but_who_asks_by_name_does() -> None:
    jit = attention("jit", band="vendor", jit=f"{__name__}:unless_small")
    offers, demand = [jit, attention("plain")], replace(GPU, head_size=128)
    choice = choose_attention(offers, demand)
    assert (choice.prefill.name, choice.decode.name) == ("plain", "plain")
    refused = next(pair for pair in choice.candidates if pair.first.name == "jit")
    assert str(refused) == f"jit ({OURS} 1.0): head size 128 is not compiled"
    assert choose_attention(offers, demand, "jit").prefill is jit
    assert choose_attention(offers, replace(GPU, head_size=64)).decode is jit


def unless_grouped(demand: Demand) -> str:
    """Another `jit`: kernels are on the disk where each query head has a KV head."""
    groups = {layer.num_heads // layer.num_kv_heads for layer in demand.layers}
    return "" if groups == {1} else f"groups {sorted(groups)} are not all compiled"


def test_what_is_asked_for_kernels_is_told_the_layers_of_both_phases() -> None:
    jit = attention("jit", band="vendor", jit=f"{__name__}:unless_grouped")
    single = AttentionParams(num_heads=2, num_kv_heads=2, head_size=64, scale=1.0)
    layers = frozenset({single, replace(single, num_kv_heads=1)})
    offers, demand = [jit, attention("plain")], replace(GPU, layers=frozenset({single}))
    choice = choose_attention(offers, demand)
    assert (choice.prefill.name, choice.decode.name) == ("jit", "jit")
    choice = choose_attention(offers, replace(demand, layers=layers))
    assert (choice.prefill.name, choice.decode.name) == ("plain", "plain")
    assert "groups [1, 2] are not all compiled" in str(choice.candidates)


def test_nobody_is_asked_for_kernels_of_a_part_that_is_refused_anyway() -> None:
    needs = (Requirement(module="no_such_module", install="pip install such"),)
    offers = [
        attention("cpu", ON_CPU, jit="no_such_module:f"),
        attention("missing", requires=needs, jit="no_such_module:f"),
        attention("theirs", by="acme", jit="no_such_module:f"),
        attention("plain"),
    ]
    assert choose_attention(offers, GPU).prefill.name == "plain"
    with pytest.raises(PluginError, match=r"attention_backend 'theirs' of acme 1.0: importing"):
        choose_attention(offers, GPU, opted_in={"acme"})


def test_fp8_cache_only_with_one_head_size_is_one_row() -> None:
    fa = attention(
        "fa",
        Cell(dtypes=("bfloat16",), kv_dtypes=("bfloat16",)),
        Cell(kv_dtypes=("float8_e4m3fn",), head_sizes=(128,), compute_capability=(9, 0)),
    )
    fp8 = {"device": "cuda", "dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}
    demand = Demand(**fp8, head_size=128, compute_capability=(9, 0))
    assert choose_attention([fa], demand).prefill is fa
    with pytest.raises(SelectionError, match="head_size=64 is not one of 128"):
        choose_attention([fa], Demand(**fp8, head_size=64, compute_capability=(9, 0)))
    with pytest.raises(SelectionError, match=r"compute capability 8.0 is below 9.0"):
        choose_attention([fa], Demand(**fp8, head_size=128, compute_capability=(8, 0)))


def test_a_demanded_feature_must_be_offered() -> None:
    window = attention("window", Cell(features=frozenset({"sliding_window"})))
    plain = attention("plain", band="vendor")
    demand = Demand(device="cpu", features=frozenset({"sliding_window"}))
    assert choose_attention([plain, window], demand).prefill is window
    with pytest.raises(SelectionError, match="no sliding_window"):
        choose_attention([plain], demand)


def expert_parts() -> tuple[list[Offer[ExpertKernel]], list[Offer[TokenDispatcher]]]:
    kernels = [
        offer(ExpertKernel, "loop", Cell(layouts=("contiguous",))),
        offer(ExpertKernel, "grouped", Cell(layouts=("batched",)), band="vendor"),
    ]
    dispatchers = [
        offer(TokenDispatcher, "local", Cell(max_ranks=1), layout="contiguous", band="portable"),
        offer(TokenDispatcher, "low-latency", ON_GPU, layout="batched", band="vendor"),
    ]
    return kernels, dispatchers


def test_an_expert_kernel_and_its_dispatcher_agree_on_the_layout() -> None:
    gpu = choose_experts(*expert_parts(), GPU)
    assert (gpu.kernel.name, gpu.dispatcher.name, gpu.layout) == (
        "grouped",
        "low-latency",
        "batched",
    )
    cpu = choose_experts(*expert_parts(), CPU)
    assert (cpu.kernel.name, cpu.dispatcher.name, cpu.layout) == ("loop", "local", "contiguous")


def test_requests_for_experts_bind_each_side_by_itself() -> None:
    choice = choose_experts(*expert_parts(), GPU, "loop")
    assert (choice.kernel.name, choice.dispatcher.name) == ("loop", "local")
    with pytest.raises(SelectionError) as caught:
        choose_experts(*expert_parts(), GPU, "grouped", "local")
    assert "grouped + local: no row of grouped that fits takes the layout contiguous" in str(
        caught.value
    )
    with pytest.raises(SelectionError, match="num_ranks=2 is above 1"):
        choose_experts(*expert_parts(), Demand(device="cpu", num_ranks=2))


def test_every_result_is_plain_json() -> None:
    attention_choice = choose_attention([attention("torch")], CPU)
    results = {
        "linear": choose("linear_kernel", [linear("torch"), linear("fast", ON_GPU)], CPU),
        "none": choose("linear_kernel", [], CPU),
        "attention": attention_choice,
        "experts": choose_experts(*expert_parts(), CPU),
        "ops": choose_ops([offer(OpSet, "torch", ops=("norm",))], CPU, ("norm",)),
    }
    plain = json.loads(json.dumps(as_plain(results)))
    assert plain["linear"]["winner"] == {
        "kind": "linear_kernel",
        "name": "torch",
        "band": "reference",
        "distribution": OURS,
        "version": "1.0",
    }
    assert plain["linear"]["candidates"][0]["refusals"] == [
        {"row": 0, "reasons": ["device=cpu is not one of cuda"]}
    ]
    assert plain["none"]["winner"] is None
    assert plain["attention"]["block_size"] == 16
    assert plain["ops"]["norm"]["why"] == "the only one that fits"
