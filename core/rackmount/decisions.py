"""The choices of a rack, kind by kind, as reports show them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rackmount.loading.locate import files_by_reader, route, serves
from rackmount.rack import Rack
from rackmount_registry.descriptors import Executor, GrammarBackend, ModelSource
from rackmount_registry.errors import listed
from rackmount_registry.offers import Offer
from rackmount_registry.plugins import PluginManager
from rackmount_registry.selection import (
    AttentionChoice,
    Candidate,
    Choice,
    ExpertsChoice,
    PairCandidate,
    Refusal,
)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Which part serves one use of a kind, and all that were weighed."""

    kind: str
    use: str = ""
    """A weight format, operations, or empty where a kind has one use."""
    winner: str | None
    """None: nothing fits."""
    why: str
    candidates: tuple[Candidate | PairCandidate, ...]

    def __str__(self) -> str:
        use = f" for {self.use}" if self.use else ""
        return f"{self.kind}{use}: {self.winner or 'NONE'}, {self.why}"


def finding(model: str, path: Path, manager: PluginManager) -> Iterator[Decision]:
    """Which sources led from a model's name to `path`, and which reader takes what is there."""
    name, hops = model, route(model, manager)
    for source, target in hops:
        named = target != name
        yield Decision(
            kind="model_source",
            use=name,
            winner=_with_origin(source),
            why=f"whose alias it is, for {target}" if named else "which serves such names",
            candidates=tuple(
                _verdict(offer, offer is source, _source_reason(offer.descriptor, name))
                for offer in manager.offers(ModelSource)
            ),
        )
        name = target
    if not hops:
        yield Decision(
            kind="model_source", use=name, winner="none", why="a path that exists", candidates=()
        )
    taken = files_by_reader(path, manager)
    matching = [(reader, files) for reader, files in taken if files]
    if len(matching) == 1:
        ((reader, files),) = matching
        names = listed([file.name for file in files], 1)
        winner, why = _with_origin(reader), f"which takes {names}"
    elif matching:
        winner, why = None, "files of several formats are there; name one file"
    else:
        winner, why = "none", "the configuration alone is there"
    yield Decision(
        kind="checkpoint_reader",
        winner=winner,
        why=why,
        candidates=tuple(
            _verdict(reader, bool(files), f"takes {', '.join(reader.descriptor.patterns)}")
            for reader, files in taken
        ),
    )


def decisions(rack: Rack, manager: PluginManager) -> Iterator[Decision]:
    """Every choice of `rack`, in the order of the mount."""
    parts, attention = rack.parts, rack.attention
    yield _claimed("architecture", rack.architecture, manager)
    scheme = _claimed("quantization_scheme", rack.scheme, manager)
    yield replace(scheme, why="requested") if rack.config.quantization else scheme
    by_op = [(op, _chosen("op_set", "", [it.winner], it)) for op, it in parts.ops.items()]
    for alike in dict.fromkeys(decision for _, decision in by_op):
        yield replace(alike, use=", ".join(op for op, decision in by_op if decision == alike))
    for form, choice in parts.linear.items():
        yield _chosen("linear_kernel", form, [choice.winner], choice)
    for form, pair in parts.experts.items():
        yield _chosen(
            "expert_kernel + token_dispatcher", form, [pair.kernel, pair.dispatcher], pair
        )
    yield _chosen("attention_backend", "", [attention.prefill, attention.decode], attention)
    yield Decision(
        kind="executor",
        winner=_with_origin(rack.executor),
        why="requested" if rack.config.executor != "auto" else "the first that takes so many ranks",
        candidates=tuple(
            _verdict(
                offer,
                (offer.descriptor.max_ranks or rack.num_ranks) >= rack.num_ranks,
                f"max_ranks={offer.descriptor.max_ranks} is below {rack.num_ranks}",
            )
            for offer in manager.offers(Executor)
        ),
    )
    yield Decision(
        kind="grammar_backend",
        winner=_with_origin(rack.grammar) if rack.grammar else "none",
        why="requested" if rack.config.grammar_backend != "auto" else "the first that is mounted",
        candidates=tuple(
            _verdict(offer, offer == rack.grammar, "comes later, or only when asked for by name")
            for offer in manager.offers(GrammarBackend)
        ),
    )


def _chosen(
    kind: str,
    use: str,
    winners: Sequence[Offer[Any] | None],
    choice: Choice[Any] | AttentionChoice | ExpertsChoice,
) -> Decision:
    names = dict.fromkeys(_with_origin(offer) for offer in winners if offer is not None)
    winner = " + ".join(names) or None
    return Decision(kind=kind, use=use, winner=winner, why=choice.why, candidates=choice.candidates)


def _claimed(kind: str, winner: Offer[Any] | None, manager: PluginManager) -> Decision:
    """A part that config.json asks for, by a name that the part claims."""
    return Decision(
        kind=kind,
        winner=_with_origin(winner) if winner else "none",
        why="as config.json says",
        candidates=tuple(
            _verdict(offer, offer == winner, f"claims {', '.join(offer.claims)}")
            for offer in manager.offers(kind)
        ),
    )


def _source_reason(source: ModelSource, name: str) -> str:
    if serves(source, name):
        return "comes later"
    has = [f"serves {source.serves}"] if source.serves else []
    return " and ".join(has + ["has no such alias"] * bool(source.aliases))


def _verdict(offer: Offer[Any], accepted: bool, reason: str) -> Candidate:
    """A part that is taken, or refused for one reason."""
    return Candidate(
        name=offer.name,
        distribution=offer.distribution,
        version=offer.version,
        band="",
        accepted=accepted,
        some_row_fits=accepted,
        refusals=() if accepted else (Refusal(row=None, reasons=(reason,)),),
    )


def _with_origin(offer: Offer[Any]) -> str:
    return f"{offer.name} ({offer.distribution} {offer.version})"
