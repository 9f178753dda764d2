"""`mtpc models`: list what runs, from the tables that decide it."""

from __future__ import annotations

import argparse

from mtpc.cli.tables import print_table, say


def command(args: argparse.Namespace) -> int:
    from mtpc.models.derived import classes, why_not
    from mtpc.models.read_config import quiet_transformers

    if not args.names and not args.all:
        _print_families()
        return 0
    refused = 0
    with quiet_transformers():
        for name in args.names or classes():
            why = why_not(name)
            refused += why is not None
            say(f"{name}: {'runs' if why is None else f'refused: {why}'}")
    return int(bool(args.names and refused))


def _print_families() -> None:
    import transformers

    from mtpc.models import FAMILIES
    from mtpc.models.derived import classes
    from mtpc.weights.gguf.families import FAMILIES as FILES

    rows = ((family.name, ", ".join(family.architectures)) for family in FAMILIES)
    print_table("families with drafts or modules of their own", ("family", "architectures"), rows)
    say(
        f"any other decoder-only causal LM of transformers {transformers.__version__} whose "
        f"attention, cache and experts go through its interfaces ({len([*classes()])} classes; "
        "`mtpc models NAME` asks one, `mtpc models --all` asks all)"
    )
    say(f"GGUF files of the architectures {', '.join(sorted(FILES))}")
