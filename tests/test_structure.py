"""The architecture, held by a test: direction of imports, sizes, and what must stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.places import ROOT, TESTS

PACKAGE = ROOT / "mtpc"
ORDER = (
    ("errors",),
    ("option_checks",),
    ("config", "sampling_params", "wiring", "acceptance"),
    ("weights",),
    ("layout",),
    ("store",),
    ("ops",),
    ("step",),
    ("models",),
    ("capture",),
    ("passes",),
    ("backends",),
    ("program",),
    ("engine",),
    ("api",),
    ("host",),
    ("integrations",),
    ("server",),
    ("evaluation", "tuning"),
    ("cli", "__main__"),
)
"""One rank a room. A room imports rooms above it, never below: the table of docs/design.md."""
KNOWN_BACKWARD: dict[str, list[str]] = {}
"""Imports in functions, or for types alone, that go backward; a comment gives each its reason."""
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def rank(name: str) -> int:
    for index, group in enumerate(ORDER):
        if any(name == item or name.startswith(item + ".") for item in group):
            return index
    raise AssertionError(f"mtpc.{name} has no place in the table of imports")


@dataclass(frozen=True)
class Imports:
    """mtpc modules that a file imports: when it is loaded, and later or for types alone."""

    at_top: set[str]
    inside: set[str]


def imports(path: Path) -> Imports:
    """`import mtpc.x`, `from mtpc.x import y` and `from mtpc import x`, wherever they stand.

    What stands in a function or below `if TYPE_CHECKING` is `inside`.
    """
    tree = ast.parse(path.read_text())
    at_top = {id(node) for node in ast.walk(tree)} - {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, (ast.FunctionDef, ast.AsyncFunctionDef)) or _is_for_types(block)
        for node in ast.walk(block)
    }
    found = Imports(set(), set())
    for node in ast.walk(tree):
        (found.at_top if id(node) in at_top else found.inside).update(_imported(node))
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _imported(node: ast.AST) -> set[str]:
    """Names of mtpc's modules below mtpc that one statement imports."""
    if isinstance(node, ast.Import):
        names = {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = {node.module}
        for alias in node.names:
            place = PACKAGE.parent.joinpath(*node.module.split("."), alias.name)
            if node.module.startswith("mtpc") and (
                place.is_dir() or place.with_suffix(".py").exists()
            ):
                names.add(f"{node.module}.{alias.name}")
    else:
        return set()
    return {name.removeprefix("mtpc.") for name in names if name.startswith("mtpc.")}


PACKAGES = ("",)
"""The package itself names the public modules of every rank."""


def backward(name: str, imported: set[str]) -> list[str]:
    """What a module imports of later ranks."""
    return sorted(other for other in imported if other not in PACKAGES and rank(other) > rank(name))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_left_never_imports_right(path: Path) -> None:
    name = module_name(path)
    if name in PACKAGES:
        return
    found = imports(path)
    assert backward(name, found.at_top) == [], f"mtpc.{name} imports backward at its top"
    assert backward(name, found.inside) == KNOWN_BACKWARD.get(name, []), name


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_sizes(path: Path) -> None:
    """Files of about 400 lines; no utils; the environment is read in config.py only."""
    source = path.read_text()
    assert len(source.splitlines()) <= 480
    assert path.stem not in ("utils", "helpers", "common", "misc")
    if path.name != "config.py":
        assert "os.environ" not in source
        assert "getenv" not in source


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_short(path: Path) -> None:
    """Bodies of at most 45 lines, docstrings not counted."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
        length = (node.end_lineno or 0) - first.lineno + 1
        assert length <= 45, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_silent_excepts(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or getattr(node.type, "id", "") in (
                "Exception",
                "BaseException",
            )
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            # An error may also be handed on as a value, to whom it concerns.
            kept = any(isinstance(n, ast.Name) and n.id == node.name for n in ast.walk(node))
            assert not broad or raises or kept, f"{path.name}:{node.lineno} swallows every error"


def test_passes_name_no_model_and_no_backend() -> None:
    for path in (PACKAGE / "passes").glob("*.py"):
        found = imports(path)
        names = found.at_top | found.inside
        assert not {n for n in names if n.startswith(("models", "backends"))}, path.name


def test_a_pass_is_named_once() -> None:
    """In its class: backends take the name from there, commands ask for passes by policy."""
    from mtpc.passes import pass_names

    found = Counter(
        node.value
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in pass_names()
    )
    assert found == Counter(pass_names())


def test_backends_choose_passes_that_leave_it_to_them() -> None:
    """A pass of the policy `backend` is some backend's, and no backend names another."""
    from mtpc.backends.cpu import CpuBackend
    from mtpc.backends.cuda import CudaBackend
    from mtpc.passes import pass_names

    chosen = {*CpuBackend.enables, *CudaBackend.enables}
    assert chosen == {*pass_names("backend")}


def test_import_is_light() -> None:
    """`import mtpc` must not import torch."""
    code = "import sys, mtpc; assert 'torch' not in sys.modules; print(mtpc.__version__)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_every_family_is_in_the_tables() -> None:
    """Of README.md, and of docs/models.md with every architecture that it serves."""
    from mtpc.models import FAMILIES

    pages = [(PACKAGE.parent / page).read_text() for page in ("README.md", "docs/models.md")]
    for family in FAMILIES:
        rows = [re.search(rf"^\| \[?{family.name}\b.*$", page, re.MULTILINE) for page in pages]
        (brief, full) = (row.group() if row else "" for row in rows)
        assert f"`{family.architectures[0]}`" in brief, family.name
        assert [name for name in family.architectures if f"`{name}`" not in full] == []


LINES = {
    # wiring.py: the rules of MTP layers, and the check of those that a user gives; acceptance.py:
    # rates of synthetic acceptance. `kv_cache_dtype`, `tensor_parallel_size` (config.py); checks
    # of single options (option_checks.py). `SpecModel.follow` and `close`.
    # `kv_offload_dir`, `draft`, and ranks as torchrun starts them.
    # `images`, and messages as prompts (api.py).
    ".": 1440,
    # Tapes: a runner and its arithmetic in place of Inductor's; the null device's pool.
    # Kernels that a wheel carries (`shipped.py`); which tensors of a flat step may be replaced.
    # Several programs for a sampled row (`filters.py`).
    # Sizes that a tape leaves open (`placing.py`); grouped weights in AMX tiles and on GPUs;
    # compilers that end with their caller; what aiter's attention takes beside ours.
    # One family of operators on codes: the older int8 operators are gone.
    # For GPUs: layers that are compiled once (`repeats.py`), experts in tiles by expert, chunks of
    # the delta rule and attention to slots (`triton_kernels/`). Linears of a few rows, choices.
    # Products and sums that do not depend on other rows (`batch_invariant`).
    # Launches that begin early; rows that are packed are looked at. Options of ranks, and graphs
    # that are released.
    # Nemotron-H on GPUs: a scan of state, also in chunks, and what it shares with the delta rule.
    # What a driver keeps of graphs (`driver_memory.py`).
    # Small exchanges through the memory of other GPUs (`peer_memory.py`, `ops/sum_ranks.py`).
    # What Inductor makes of a GPU's step, kept in the graph cache (`kept_steps.py`).
    # Experts on aiter's kernel, and the orders in which kernels read weights (`bindings.py`).
    # Experts by grouped products of PyTorch's, where a trial prefers them (`torch_experts.py`).
    # How aiter cuts contexts, and what it allocates (`aiter/sizes.py`); its norms are gone.
    # Codes of keys and values on GPUs (`triton_kernels/codes.py`).
    "backends": 12480,
    # Copies of layers that repeat (`repeat_layers.py`); weights made from codes (`WeightTable`),
    # and made late where every step is cached.
    # Sizes of state as symbols while a step is inlined (`step_mode.py`). What acts outside of a
    # graph stays (`effects.py`). Of calls on fake tensors that are alike, one is run
    # (`fake_calls.py`).
    # Weights whose elements are moved for a kernel, in all steps alike.
    "capture": 1660,
    # `mtpc check`, `mtpc quantize`, `mtpc graft`; options as vLLM's users type them; where kernels
    # come from; `mtpc chat`, `mtpc completion`, `mtpc bench --plot`, `mtpc plan`, `mtpc eval`.
    # `mtpc tune-head`.
    # `--quiet`, `--json`, `--draft`, and processes for ranks (`ranks.py`). One line for a wrong
    # command.
    "cli": 4530,
    # The outbox and what mends an interrupted call; names that people type; `Completion`; snapshots
    # of state outside of pages (`snapshots.py`), and which page has one (`prefix.py`); K by cost,
    # length and acceptance, within a budget (`tiers.py`, `accepted.py`). Scores of given tokens.
    # Pages and snapshots in files (`offload.py`, `offload_files.py`); costs of K (`costs.py`).
    # Accounts of what trials of a K lose, and of what is lost to plain decoding (`tiers.py`).
    # Images: files, embeddings and what rows read of them (`vision.py`, `prompt_images.py`);
    # embeddings of images that come again. Costs of steps from run to run (`earlier_costs.py`).
    # What a request's tokens are worth to the choice of K. An outbox that interrupts leave whole.
    "engine": 5870,
    # Tasks with answers by several engines (`mtpc eval`), and the harness's model class.
    "evaluation": 610,
    "host": 520,
    # Ends of a layer's own are found in a host's checkpoint. A backend of torch.compile
    # (`dynamo/`). Linear layers and experts by the host (`layer_sites.py`, `layer_weights.py`).
    # Weights that a graph reads by `.data` (`dynamo/`).
    # What hosts' parallel layers share (`parallel_layers.py`), and those of SGLang.
    "integrations": 4420,
    # Which buffers hold state by request slot, and sizes of their snapshots; synthetic draws.
    # How progress is shown (`display.py`, from cli); sizes that a step leaves open.
    "layout": 1010,
    # What a model object must be; own heads and embeddings, MiMo-V2's released config; models of
    # headers (`header_weights.py`), and which layers repeat (`layer_pattern.py`). Faults of MTP
    # tensors (`mtp_faults.py`), and MTP tensors put back (`graft.py`). GLM-4.7-Flash, GLM-5, ERNIE,
    # K-EXAONE and Nemotron 3 (Mamba-2). Models of config.json alone (`from_config.py`), and what of
    # each tensor a rank holds (`shards.py`). Pages of codes (`caches.py`, `load.py`). Trained MTP
    # tensors by the names that a checkpoint has for them.
    # EAGLE-3 heads and MTP layers in a directory of their own; Llama, Qwen2 and Qwen3.
    # Which entry of config.json transformers refuses (`refused_config.py`).
    # Vision towers and positions in images (`vision.py`, `image_inputs.py`), of three kinds of
    # checkpoint. GLM-4.5V, and Gemma 4 with its assistant (`gemma4_assistant.py`, `heads.py`).
    # LongCat-Flash, and layers with several caches. What a first draft hands to later ones.
    # Qwen4-Exp: choices of blocks and embeddings of n-grams (`qwen4_exp_layers.py`).
    # Rules by which ranks cut drafters.
    "models": 7700,
    # Linear layers and experts on grouped weights (`grouped.py`), and on those with minima.
    # Mamba-2, and experts without gates. Codes of keys and values, in the cache write and in
    # attention. Collectives (`collectives.py`).
    # Attention to slots, which DeepSeek-V4 has (`slot_attention.py`). The exchange of GPUs.
    # Blocks of large sums (`exchange_ranks`), and small sums (`sum_ranks`).
    "ops": 2950,
    # Grouped linears as stages of chains; pack-groups.
    # A step for one of several ranks: `shard.py`, and what follows from a cut (`held.py`).
    # What sums by a shape of rows is taken apart (`batch_invariant.py`).
    # Stacked values and rows of a table in parts (`held.py`); a trimmed head in parts.
    # Collectives as plain operators around one exchange (`spell_collectives.py`).
    # Sums by blocks (`spell_collectives.py`).
    "passes": 3800,
    # Processes that end together (`program/processes.py`), and records checked by their types; the
    # host's memory planned before a build (`host_memory.py`). Ctrl-C while this process traces.
    # Which models' rings a prefill step sizes, in the key. Weights that are joined for a GPU are
    # not counted twice. Memory by rank and the time of a step, on paper (`scale.py`).
    # Ranks: what each holds, agrees on and repeats (`ranks.py`, `rank_share.py`, `follow.py`).
    # Steps built while others serve (`background.py`).
    # Time left (`Forecast`); whose pages a file holds (`page_identity`); ranks in builds and
    # keys; why a build in the background failed. Processes that build beside the one that traced
    # the model (`workers.py`).
    # Memory that ranks of one machine share (`ranks.py`). What is read ahead (`binding.py`).
    # Results in one memory, an entry of costs (`program.py`).
    # Slices of codes, checked as they are read (`binding.py`).
    # Ranks on GPUs: devices and groups (`rank_devices.py`), agreement (`lowering.py`), a bound on
    # steps (`StepWatch`). A rank's slices where no cache keeps steps (`part_weights.py`).
    # Memory of GPUs that ranks share (`rank_devices.py`). Steps that are planned and then run
    # (`memory_plan.py`).
    "program": 5645,
    # Limits on templates, names of hosts, clients that half-close. Tools, formats and reasoning
    # (`conversation.py`, `tool_formats.py`, `chat_parser.py`, `lark.py`, `grammars.py`).
    # What heads must be, for both parsers (`heads.py`); the server as an ASGI application. `echo`.
    # A process that renders chat templates (`renderer.py`, `sandbox.py`).
    # Images in messages.
    "server": 3910,
    # A drafter's own entry, tokens and logits.
    # Drafts at one position (`single_position.py`); rows of images that a later step reads.
    # What a first draft hands to later ones.
    "step": 1320,  # Synthetic acceptance (`synthetic.py`).
    # Temporary directories that outlive no process for long (`store/scratch.py`).
    "store": 945,
    # Training MTP layers: their drafts with gradients, texts, runs that resume (`mtpc tune-head`).
    # Experts on round numbers of rows (`experts.py`).
    "tuning": 1040,
    # Hub ids, checks of a checkpoint's JSON files, fused projections of queries, keys and values;
    # weights of 4 and 8 bits with scales of groups.
    # Formats of quantised weights (`formats/`), making and writing them. Files apart from weights
    # (`checkpoint_files.py`), and sharded writing by itself (`shards.py`).
    # GGUF files: header, blocks, and what llama.cpp's converter did to six families (`gguf/`).
    # MXFP4 in safetensors (`formats/mxfp4.py`). Rows of weights in groups, read as they are packed.
    # A target and its drafter (`paired_checkpoint.py`), digests of contents (`content.py`), and
    # recipes that read a rank's part alone. Files larger than memory. A thread that reads the next
    # tensors while one is packed (`read_ahead.py`), all into the same memory in turn.
    # Slices of weights in groups, along their inputs too.
    # Parts of stored tensors, cast after they are taken.
    "weights": 5850,
}
"""Most lines of Python in each folder of mtpc. Raise one only with a comment that says why."""


def test_folders_do_not_grow() -> None:
    """Every file counts for its folder of mtpc; prints the table to paste where one is over."""
    found = Counter[str]()
    for path in FILES:
        folder = path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."
        found[folder] += len(path.read_text().splitlines())
    over = {name: count for name, count in found.items() if count > LINES.get(name, 0)}
    table = "".join(
        f'    "{name}": {-(-count // 50) * 50},\n' for name, count in sorted(found.items())
    )
    assert not over, f"{over}\n\nLINES = {{\n{table}}}"
    assert LINES.keys() == found.keys(), f"LINES = {{\n{table}}}"


TEST_FILES = sorted(TESTS.rglob("*.py"))
TOP = {
    "conftest.py",
    "test_no_machine_paths.py",
    "test_public_api.py",
    "test_recipes.py",
    "test_structure.py",
    "test_theorem.py",
}


def test_tests_have_rooms() -> None:
    assert {path.name for path in TESTS.glob("*.py")} == TOP


def test_nothing_imports_from_a_test_module() -> None:
    pattern = re.compile(r"^\s*(from|import) (\S*\.)?(test_\w+|conftest)\b", re.MULTILINE)
    assert [str(path) for path in TEST_FILES if pattern.search(path.read_text())] == []


def test_what_needs_triton_is_marked() -> None:
    """Where a module is skipped without Triton, tests/run_triton.sh finds it by its marker."""
    for path in TEST_FILES:
        source = path.read_text()
        for skip, marker in (("INTERPRETS", "triton"), ("COMPILES", "gpu_compile")):
            if f"if not {skip}:" in source and path != Path(__file__):
                assert f"pytestmark = pytest.mark.{marker}\n" in source, path.name


def test_lines_of_documents_wrap() -> None:
    """At 120 characters; tables, pictures and the renderer's comments do not."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert len(pages) > 10
    long = [
        f"{page.name}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 120 and not re.search(r"^\||^!\[|<!--|-->", line)
    ]
    assert long == []
