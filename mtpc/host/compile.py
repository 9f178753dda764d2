"""From a model to a `HostedModel`: built steps, that are bound to a host's tensors later."""

from __future__ import annotations

from typing import Any, Unpack, get_args

from mtpc.arguments import CompileArguments
from mtpc.config import CompileOptions
from mtpc.declaration import declared
from mtpc.errors import OptionError
from mtpc.host.hosted import HostedModel
from mtpc.layout import Form, Layout
from mtpc.layout.display import show_compiling
from mtpc.layout.progress import Listener
from mtpc.program.open_cache import plan_model
from mtpc.program.open_steps import Wanted, open_steps


def compile_host(
    model: Any,
    form: Form = "split",
    progress: Listener | None = None,
    **options: Unpack[CompileArguments],
) -> HostedModel:
    """Compile a model into `verify` and `propose` programs over buffers that the caller owns.

    Nothing is allocated: `HostedModel.bind` binds the compiled steps to the caller's tensors.
    docs/embedding.md is the contract. Packages of the cpu backend go through the graph cache;
    `mtpc build --split` builds them ahead.

    Args:
        model: as for `mtpc.compile`.
        form: "split" (verify and propose), "fused" (one graph a step), or "both".
        progress: see `mtpc.compile`.
        **options: fields of `mtpc.CompileOptions` but the engine's; `sampling` is off by default.

    Raises:
        OptionError: an option is unknown, out of range, or the engine's.
        MtpcError: as `mtpc.compile`.
    """
    if form not in get_args(Form):
        raise OptionError(f"form is {form!r}; expected one of {', '.join(get_args(Form))}")
    for name, said in declared(CompileOptions):
        if name in options and not said.for_hosts:
            raise OptionError(f"{name} belongs to mtpc.compile; compile_host has no engine")
    asked = CompileOptions.parse({"sampling": False, **options})
    with show_compiling(progress) as listener:
        wanted = Wanted(form, False, lambda found: found.built)
        opened = open_steps(model, asked, wanted, listener)
    found = opened.model
    of_model = (found.served, found.plan, form, found.device, opened.fallbacks)
    return HostedModel(*of_model, opened.made)


def page_bytes(model: str, **options: Unpack[CompileArguments]) -> int:
    """Bytes of a page, of all pools of `compile_host` together.

    It reads a checkpoint's headers, and compiles nothing.

    Args:
        model: a checkpoint's directory.
        **options: see `compile_host`.

    Raises:
        MtpcError: as `compile_host`.
    """
    # Not above: where steps come from the graph cache, the compiler is not imported.
    from mtpc.backends.eager import EagerBackend
    from mtpc.models.load import load_planned
    from mtpc.program.compiler import StepCompiler
    from mtpc.program.memory_plan import state_bytes

    asked = CompileOptions.parse({"sampling": False, **options})
    source, plan = plan_model(model, asked, must_draft=True)
    loaded = load_planned(source, plan, headers_only=True)
    compiler = StepCompiler(loaded, plan, EagerBackend(), new_buffer=Layout.reserve)
    return state_bytes(compiler)[1]
