"""`mtpc check`: find faults of a checkpoint's MTP layers, and the wiring with the most acceptance.

It checks the tensors first. If they have no fault, it measures acceptance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mtpc
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import BENCH_PROMPTS, chosen_checkpoint
from mtpc.cli.opening import Prompt, check_tokenizer, set_threads
from mtpc.cli.parsing import typed
from mtpc.cli.tables import print_rows, print_table, say
from mtpc.errors import OptionError
from mtpc.layout.display import Tell
from mtpc.layout.terminal import show_progress
from mtpc.option_checks import drafters_of
from mtpc.wiring import Rules, check_rules, choices, rule_text

if TYPE_CHECKING:
    from mtpc.engine.stats import DraftCounts
    from mtpc.models.load import LoadedModel
    from mtpc.models.mtp_faults import Fault
    from mtpc.plan import Plan

CLEARLY_MORE = 0.05
"""Another rule is recommended if it gains this many tokens per step."""


@dataclass(frozen=True)
class Sample:
    """The acceptance of one wiring.

    Attributes:
        rules: rules that differ from those of the checkpoint's family.
        tokens_per_step: mean tokens per decode step of one request, the bonus token included.
        results: the continuation of each prompt.
        declared: `Drafting.declared`.
    """

    rules: Rules
    tokens_per_step: float
    drafts: DraftCounts
    results: Sequence[Prompt]
    declared: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """The result of the checks.

    Attributes:
        faults: faults of the tensors, or the single fault that no wiring accepts enough drafts.
        better: rules that accept clearly more drafts, in the format of `--wiring`; "" if none do.
    """

    faults: tuple[Fault, ...] = ()
    better: str = ""


def command(args: argparse.Namespace) -> int:
    """Run the subcommand. Return 0 without faults and without a rule that accepts clearly more."""
    prompts: list[Prompt] = args.prompts or list(BENCH_PROMPTS)
    checkpoint = chosen_checkpoint(args.checkpoint)
    given = {"batch_buckets": (len(prompts),), "backend": "eager", **compile_options(args)}
    options = mtpc.CompileOptions.parse(given)
    if options.spec_tokens == 0:
        raise OptionError("spec_tokens is 0; expected at least one draft to check")
    with show_progress(sys.stderr, args.quiet) as tell:
        tell("import torch and transformers")
        from mtpc.models.mtp_faults import find_draft_faults, find_faults
        from mtpc.program.open_cache import drafter_of

        set_threads(args.threads, checkpoint)
        drafter, (copies, other) = drafter_of(options), drafters_of(options.draft)
        tell(f"examine the MTP tensors of {drafter or checkpoint}")
        if drafter is not None:
            faults = find_draft_faults(checkpoint, drafter, options.dtype)
        else:
            faults = find_faults(checkpoint, options.dtype) if other else []
        samples: list[Sample] = []
        if not faults:
            check_tokenizer(checkpoint, prompts)
            samples = list(_measure(checkpoint, options, prompts, args.max_new_tokens, tell))
    verdict = Verdict(tuple(faults))
    if samples and not copies:  # How much is copied is a matter of the text.
        verdict = _judge(samples, args.floor, drafter is not None)
    if args.as_json:
        args.result = _as_json(samples, verdict)
    else:
        _print(samples, verdict, check_rules(options.wiring))
    return int(bool(verdict.faults or verdict.better))


def _measure(
    checkpoint: Path, options: mtpc.CompileOptions, prompts: list[Prompt], new: int, tell: Tell
) -> Iterator[Sample]:
    """Decode the prompts with the given wiring, then with one rule changed at a time."""
    from mtpc import SpecModel
    from mtpc.backends import make_backend
    from mtpc.models.load import load_planned
    from mtpc.models.place import place
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.open_cache import kernel_store, plan_model

    source, plan = plan_model(checkpoint, options)
    store = kernel_store(plan, None)
    backend = make_backend(plan.backend, tell, store, plan.batch_invariant)
    tell(f"load {checkpoint}")
    loaded = place(load_planned(source, plan), backend.device)
    others = () if plan.copies else _others(loaded.wired(plan.wiring), plan)
    variants = [plan.wiring, *others]
    for number, rules in enumerate(variants, start=1):
        tell(f"{number}/{len(variants)} {rule_text(rules) or 'the wiring of the family'}")
        compiler = StepCompiler(loaded.wired(rules), plan, backend)
        served = compiler.loaded.served()
        model = SpecModel(served, compiler.plan, compiler.compile(), compiler.loaded)
        results = model.generate(prompts, new, ignore_eos=True)
        declared = compiler.drafter(compiler.keys[0])
        yield Sample(rules, model.stats.acceptance_length, model.stats.drafts, results, declared)


def _others(loaded: LoadedModel, plan: Plan) -> Iterator[Rules]:
    """The given rules with one more rule changed, for each rule that makes a difference here."""
    wiring, layers = loaded.family.wiring, loaded.mtp_layers
    ends = {
        "head": loaded.target.get_output_embeddings(),
        "embedding": loaded.target.get_input_embeddings(),
    }
    matters = {
        role: any(  # An embedding or head of the layer's own that is not a copy of the target's.
            own is not None and own.weight.data_ptr() != end.weight.data_ptr()
            for own in (getattr(layer, role) for layer in layers)
        )
        for role, end in ends.items()
    }
    matters |= dict.fromkeys(("hidden_first", "zero_first_embedding", "first_features"), True)
    matters["next_features"] = plan.spec_tokens > 1
    matters["chaining"] = len(layers) > 1 and plan.spec_tokens > 1
    if wiring.only_rules:
        matters = {rule: matters[rule] for rule in wiring.only_rules}
    for rule, values in choices().items():
        for value in values:
            if matters.get(rule) and value != getattr(wiring, rule):
                changed: dict[str, Any] = {**dict(plan.wiring), rule: value}
                yield tuple(sorted(changed.items()))


def _judge(samples: list[Sample], floor: float, has_drafter: bool) -> Verdict:
    """The verdict on samples, of which the first has the given rules."""
    first, best = samples[0], max(samples, key=lambda sample: sample.tokens_per_step)
    highest = max(sample.drafts.by_position[0] for sample in samples)
    if highest < floor:
        return Verdict((_foreign(highest, floor, has_drafter),))
    if best.tokens_per_step < first.tokens_per_step + CLEARLY_MORE:
        return Verdict()
    return Verdict(better=rule_text(best.rules))


def _as_json(samples: list[Sample], verdict: Verdict) -> dict[str, Any]:
    rows = [
        {
            "wiring": rule_text(sample.rules),
            "tokens_per_step": sample.tokens_per_step,
            "accepted": sum(sample.drafts.accepted),
            "drafted": sum(sample.drafts.drafted),
            "by_position": sample.drafts.by_position,
            "same_text": sample.results == samples[0].results,
        }
        for sample in samples
    ]
    faults = [asdict(fault) for fault in verdict.faults]
    drafter = samples[0].declared if samples else None
    verdicts = {"faults": faults, "better": verdict.better or None}
    return {**verdicts, "drafter": drafter, "wirings": rows}


def _print(samples: list[Sample], verdict: Verdict, given: Rules) -> None:
    if samples:
        first, *others = samples
        print_table("Drafter", ("", ""), first.declared.items())
        rows = [
            {
                "wiring": rule_text(sample.rules) or ("the family's" if others else "none"),
                "tokens/step": f"{sample.tokens_per_step:.2f}",
                "accepted": f"{sum(sample.drafts.accepted)} of {sum(sample.drafts.drafted)}",
                "by position": "  ".join(f"{rate:.1%}" for rate in sample.drafts.by_position),
                "same text": "yes" if sample.results == first.results else "no",
            }
            for sample in samples
        ]
        print_rows("Accepted drafts by wiring", rows)
    for fault in verdict.faults:
        say(f"{fault.kind}: {fault.problem}\n  what to do: {typed(fault.remedy)}")
    if verdict.faults or len(samples) == 1:  # Copies have no wiring.
        return
    better = (
        f"--wiring {verdict.better} accepts" if verdict.better else "no other rule accepts clearly"
    )
    say(f"{better} more than {rule_text(given) or 'the wiring of the family'}")


def _foreign(highest: float, floor: float, has_drafter: bool) -> Fault:
    """The fault of MTP layers whose drafts are rejected with every wiring."""
    from mtpc.models.mtp_faults import Fault

    remedy = (
        "the drafter belongs to another model: give the one that was trained for this target"
        if has_drafter
        else "the MTP layers belong to another model: put those of this one's base back: mtpc "
        "graft BASE CHECKPOINT OUT"
    )
    return Fault(
        "other base",
        f"no wiring has more than {highest:.1%} of its first drafts accepted; expected at least "
        f"{floor:.0%} (--floor)",
        f"if the texts suit the model (-p), {remedy}",
    )
