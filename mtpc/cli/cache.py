"""`mtpc cache ls | inspect | verify | why | prune`: the graph cache's entries and their state."""

from __future__ import annotations

import argparse
import gzip
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtpc import CompileOptions
from mtpc.backends import PACKAGING
from mtpc.cli.certificates import check_certificate
from mtpc.cli.compile_arguments import compile_options
from mtpc.cli.demo import chosen_checkpoint
from mtpc.cli.opening import set_threads
from mtpc.cli.tables import format_bytes, print_table, say
from mtpc.environment import cache_directory
from mtpc.errors import CacheError, DamagedEntryError, OptionError
from mtpc.layout import StepKey, step_keys
from mtpc.program.forecast import reasons
from mtpc.program.open_cache import open_cache, plan_model
from mtpc.program.step_cache import CERTIFICATE, KIND, RECORD, StepCache, read_record
from mtpc.program.step_record import FORMAT
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.key import Difference, differences
from mtpc.store.lookup import KERNELS, key_of
from mtpc.store.machine import COMPILER, environment_fields, machine_fields

_DAY_S = 86400
_PER_PROCESS = ("torch.",)
"""Prefixes of key fields that may differ between processes. They do not make an entry stale."""


@dataclass(frozen=True)
class Row:
    """An entry of the cache, None if it is damaged, and its state.

    Attributes:
        damage: what is wrong with the entry's files, or an empty string.
        stale: key fields whose value is another on this machine or with this version of mtpc.
    """

    digest: str
    entry: Entry | None
    fields: dict[str, str]
    damage: str = ""
    stale: tuple[Difference, ...] = ()


def command(args: argparse.Namespace) -> int:
    """Run the subcommand, and return the exit code.

    It is 1 if `verify` finds a damaged entry or a certificate that does not hold, or if `why` finds
    a step that the cache lacks, else 0.
    """
    actions = {"ls": _ls, "inspect": _inspect, "verify": _verify, "why": _why, "prune": _prune}
    return actions[args.action](args)


def _store(args: argparse.Namespace) -> EntryStore:
    return EntryStore(args.cache_dir or cache_directory())


def examine(store: EntryStore) -> Iterator[Row]:
    """Yield every entry, after checking its files and comparing its key with this machine's.

    Raises:
        CacheError: another user could have written the cache.
    """
    here = {"format": str(FORMAT), **environment_fields(), **machine_fields()}
    for digest in store.digests():
        try:
            entry = store.read(digest)
            if entry is not None:
                fields = key_of(entry)
                if fields.get("kind") == KIND and fields.get("format") == here["format"]:
                    read_record(entry)
                yield Row(digest, entry, fields, stale=tuple(_stale(fields, here)))
        except DamagedEntryError as error:
            yield Row(digest, None, {}, damage=str(error))


def _stale(fields: dict[str, str], here: dict[str, str]) -> Iterator[Difference]:
    comparable = {name: here[name] for name in fields if name in here}
    for difference in differences({n: fields[n] for n in comparable}, comparable):
        if not difference.field.startswith(_PER_PROCESS):
            yield difference
    if COMPILER in here and fields.get("kind") == KERNELS and COMPILER not in fields:
        yield Difference(COMPILER, None, here[COMPILER])


def _ls(args: argparse.Namespace) -> int:
    store = _store(args)
    rows = list(examine(store))
    print_table(
        f"{store.root}: {len(rows)} entries",
        ("entry", "content", "model", "age", "size", "built in", "state"),
        [_cells(row) for row in rows],
        ("", "", "", "", format_bytes(sum(_nbytes(store, row) for row in rows)), "", ""),
    )
    for path in store.leftovers():
        say(f"left by a killed build: {path}")
    return 0


def _cells(row: Row) -> tuple[str, ...]:
    if row.entry is None:
        return row.digest[:8], "", "", "", "", "", f"damaged: {row.damage}"
    age = _age(time.time() - row.entry.directory.stat().st_mtime)
    size, state = format_bytes(row.entry.nbytes), _state(row)
    if row.fields.get("kind") != KIND or row.fields.get("format") != str(FORMAT):
        return row.digest[:8], str(row.fields.get("kind")), "", age, size, "", state
    record = read_record(row.entry)
    seconds = f"{sum(record.seconds.values()):.1f} s"
    return row.digest[:8], record.name, Path(record.source).name, age, size, seconds, state


def _state(row: Row) -> str:
    if not row.stale:
        return "fits this machine"
    more = f" and {len(row.stale) - 1} more" if len(row.stale) > 1 else ""
    return f"stale: {row.stale[0]}{more}"


def _age(seconds: float) -> str:
    for unit, length in (("d", _DAY_S), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _nbytes(store: EntryStore, row: Row) -> int:
    if row.entry is not None:
        return row.entry.nbytes
    directory = store.directory(row.digest)
    return sum(path.lstat().st_size for path in directory.iterdir())


def _inspect(args: argparse.Namespace) -> int:
    store = _store(args)
    names = [name for name in store.digests() if name.startswith(args.entry)]
    if len(names) != 1:
        found = ", ".join(name[:8] for name in names) or "none"
        raise OptionError(
            f"{args.entry!r} fits {found} of the entries in {store.root}; expected the beginning "
            "of one entry's name: `mtpc cache ls` lists them"
        )
    entry = store.read(names[0])
    if entry is None:
        raise CacheError(f"another process has just removed the entry {names[0]}")
    if args.graph is not None:
        _print_graph(entry, args.graph)
        return 0
    rows = sorted(key_of(entry).items())
    print_table(f"{entry.directory}: its key", ("field", "value"), rows)
    if RECORD in entry.files:
        record = read_record(entry)
        passes = [
            (p.name, str(p.rewrites), str(p.nodes_before), str(p.nodes_after), f"{p.seconds:.2f} s")
            for p in record.history
        ]
        title = f"{record.name} of {record.source}, built {record.created}"
        print_table(title, ("pass", "rewrites", "nodes", "after", "time"), passes)
        stages = [(stage, f"{seconds:.1f} s") for stage, seconds in record.seconds.items()]
        print_table("Build", ("stage", "time"), stages)
    files = [
        (name, format_bytes((entry.directory / name).stat().st_size), sha256)
        for name, sha256 in entry.files.items()
    ]
    print_table("Files", ("file", "size", "SHA-256"), files)
    return 0


def _print_graph(entry: Entry, name: str) -> None:
    """Print the text of the graph after the pass `name`."""
    texts = [file for file in entry.files if file.startswith("graph.")]
    files = {file.split("-", 1)[1].removesuffix(".txt.gz"): file for file in texts}
    if name not in files:
        known = ", ".join(files)
        raise OptionError(f"this entry has no graph after {name!r}; expected one of: {known}")
    print(gzip.decompress(entry.read(files[name])).decode())


def _verify(args: argparse.Namespace) -> int:
    store = _store(args)
    rows = list(examine(store))
    damaged = [row for row in rows if row.entry is None]
    for row in damaged:
        say(f"damaged: {row.damage}")
    files = sum(len(row.entry.files) for row in rows if row.entry)
    say(f"{len(rows) - len(damaged)} of {len(rows)} entries are whole ({files} files)")
    entries = [row.entry for row in rows if row.entry and CERTIFICATE in row.entry.files]
    found = [(read_record(entry), *check_certificate(entry)) for entry in entries]
    for record, is_certified, line in found:
        if is_certified is None:
            say(f"forged: {record.name} of {record.source}: {line}")
        elif not is_certified and record.uncertified:
            say(f"{record.name} of {record.source}: {line}")
    certified = sum(is_certified is True for _, is_certified, _ in found)
    say(f"{certified} of {len(found)} steps are certified")
    return 1 if damaged or any(row[1] is None for row in found) else 0


def _why(args: argparse.Namespace) -> int:
    checkpoint = chosen_checkpoint(args.checkpoint)
    asked = CompileOptions.parse(compile_options(args))
    set_threads(args.threads, checkpoint)
    source, plan = plan_model(checkpoint, asked)
    cache = open_cache(source, plan, say)
    if cache is None:
        raise OptionError(f"backend {plan.backend!r} has no cache; use {PACKAGING}")
    answers = {str(key): _answer(cache, key) for key in step_keys(plan)}
    print_table(str(cache.store.root), ("step", "in the cache?"), answers.items())
    return 0 if all(answer.startswith("yes") for answer in answers.values()) else 1


def _answer(cache: StepCache, key: StepKey) -> str:
    step = cache.find(key)
    if step is not None and step.entry is not None:
        return f"yes: {step.entry.digest[:8]}"
    found = reasons(cache, key)
    if found is None:
        return "no: the cache has no steps"
    return "no: " + ("\n".join(map(str, found)) or "its entry is damaged")


def _prune(args: argparse.Namespace) -> int:
    store = _store(args)
    removed = 0
    for row in list(examine(store)):
        reason = _reason_to_remove(row, args)
        if reason:
            removed += _nbytes(store, row)
            say(f"{row.digest[:8]}: {reason}")
            if not args.dry_run:
                store.remove(row.digest)
    for path in store.leftovers():
        say(f"{path.name}: left by a killed build")
        if not args.dry_run:
            shutil.rmtree(path, ignore_errors=True)
    say(f"{'would free' if args.dry_run else 'freed'} {format_bytes(removed)}")
    return 0


def _reason_to_remove(row: Row, args: argparse.Namespace) -> str:
    if row.entry is None:
        return f"damaged: {row.damage}"
    age_days = (time.time() - row.entry.directory.stat().st_mtime) / _DAY_S
    if args.all:
        return "removed because of --all"
    if args.older_than is not None and age_days > args.older_than:
        return f"{age_days:.1f} days old"
    return _state(row) if row.stale else ""
