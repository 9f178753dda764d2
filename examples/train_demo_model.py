"""Train the small GLM-4-MoE checkpoint with one MTP layer that ships in ``mtpc/demo``.

The text is part of every Python installation (the pages of ``help()``, and the docstrings and
comments of the standard library). The run needs no network and no accelerator:

    OMP_NUM_THREADS=1 python examples/train_demo_model.py --out mtpc/demo --minutes 38

First, the target and the MTP layer train together on the text.  Then the frozen target generates
texts, and the MTP layer learns to predict them, also from its own output, as in decoding.
``--eval-only`` measures an existing checkpoint.  ``--texts-only`` writes the training and the
held-out text to the folder in ``--out``, for ``mtpc tune-head``.
"""

import argparse
import ast
import copy
import hashlib
import json
import math
import platform
import re
import sysconfig
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache, Glm4MoeConfig, PreTrainedTokenizerFast
from transformers.models.glm4_moe import modeling_glm4_moe as glm

from mtpc.models.seams import CACHE

END_OF_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = Path(__file__).parents[1] / "mtpc/demo/chat_template.jinja"
NO_DOCUMENTATION = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
HELD_OUT_ONE_IN = 12
COMMENT = re.compile(r"(?:^[ \t]*# [A-Za-z(].*\n){2,}", re.MULTILINE)  # two lines or more
TOPIC_COPIES = 2  # copies of each topic in the training text; topics are its best prose
BATCH, SEQUENCE, DROPOUT = 6, 320, 0.1
PROMPT, NEW_TOKENS, EVAL_PROMPTS = 64, 64, 32
JOINT_MTP_WEIGHT, DEPTH_WEIGHTS = 0.5, (1.0, 0.6, 0.4)  # weights of losses; one per draft position
JOINT_SHARE, OWN_TEXT_SHARE, REPORTS = 0.72, 0.15, 12  # of all time; of phase two; per phase

SHAPE = dict(  # a small GLM-4.5: one dense layer, three MoE layers, one MTP layer
    vocab_size=2048, hidden_size=192, intermediate_size=512, moe_intermediate_size=96,
    num_hidden_layers=4, first_k_dense_replace=1, num_nextn_predict_layers=1,
    num_attention_heads=6, num_key_value_heads=2, head_dim=32, use_qk_norm=True,
    attention_bias=True, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2,
    tie_word_embeddings=False, max_position_embeddings=2048, initializer_range=0.05,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
)  # fmt: skip

LICENSE_NOTE = """\
`examples/train_demo_model.py --minutes {minutes:g} --seed {seed}` made every file in this folder.
The weights started from random numbers; no other model went into them. The training text is what
Python {python} carries: the language reference in `pydoc_data.topics`, and the docstrings and
comments of the standard library, Copyright (c) Python Software Foundation, under the PSF License
Agreement (https://docs.python.org/3/license.html). `training.json` holds the measured figures.
"""


def module_document(name: str, source: str) -> str:
    """The docstrings of one module, each after its object's name, then the module's comments."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and (doc := ast.get_docstring(node)):
            parts.append(getattr(node, "name", name) + "\n\n" + textwrap.indent(doc, "   "))
    parts += [re.sub(r"(?m)^[ \t]*# ?", "", block).strip() for block in COMMENT.findall(source)]
    return "\n\n".join(parts)


def collect_documents() -> dict[str, str]:
    """All documents of the corpus by name: the ``help()`` topics, then the stdlib modules."""
    documents = {f"topic:{name}": text.strip() for name, text in topics.items()}
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not NO_DOCUMENTATION.intersection(parts):
            name = ".".join(parts).removesuffix(".__init__")
            documents[f"module:{name}"] = module_document(name, path.read_text("utf-8"))
    return documents


def split_documents(documents: dict[str, str]) -> tuple[list[str], list[str]]:
    """Split into training and held-out texts by the names' hashes. Drop repeated paragraphs.

    The topics quote each other: the page about ``with`` is also a section of the page about
    compound statements. So training pages lose the paragraphs that held-out pages contain.
    """
    hashes = {name: int(hashlib.sha256(name.encode()).hexdigest(), 16) for name in documents}
    texts, seen = {True: [], False: []}, set()
    for name in sorted(documents, key=lambda name: (hashes[name] % HELD_OUT_ONE_IN != 0, name)):
        kept = []
        for paragraph in documents[name].split("\n\n"):
            key = " ".join(paragraph.split())
            kept += [paragraph] if len(key) < 50 or key not in seen else []  # < 50: titles
            seen.add(key)
        copies = TOPIC_COPIES if name.startswith("topic:") else 1
        is_train = hashes[name] % HELD_OUT_ONE_IN != 0
        texts[is_train] += ["\n\n".join(kept)] * (copies if is_train else 1)
    return texts[True], texts[False]


class MtpLayer(glm.Glm4MoeDecoderLayer):
    """A decoder block and the further tensors of an MTP layer, under the names of GLM-4.5."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config, layer_idx=config.num_hidden_layers)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = glm.Glm4MoeRMSNorm(width, eps)
        self.hnorm = glm.Glm4MoeRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": glm.Glm4MoeRMSNorm(width, eps)})

    def draft(self, embeddings: Tensor, hidden: Tensor, **block: object) -> Tensor:
        """The hidden state that predicts the token after the one in ``embeddings``."""
        joined = torch.cat([self.enorm(embeddings), self.hnorm(hidden)], dim=-1)
        return self.shared_head["norm"](self(self.eh_proj(joined), **block))


class DemoModel(glm.Glm4MoeForCausalLM):
    """The target, with the MTP layer as an additional last layer that its forward does not run."""

    def __init__(self, config: Glm4MoeConfig) -> None:
        super().__init__(config)
        self.model.layers.append(MtpLayer(config))
        self.post_init()

    def draft_states(self, ids: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Hidden states of the draft steps: column ``i`` of step ``d`` predicts ``i + d + 1``."""
        mtp, cache, states, length = self.model.layers[-1], DynamicCache(), [], ids.shape[1]
        for step in range(1, depth + 1):
            embeddings = self.model.embed_tokens(ids[:, step:])
            rope = self.model.rotary_emb(embeddings, torch.arange(step, length)[None])
            block = {"position_embeddings": rope, "attention_mask": chain_mask(length, step)}
            hidden = mtp.draft(embeddings, hidden[:, :-1], **{CACHE: cache}, **block)
            states.append(hidden)
        return states


def chain_mask(length: int, step: int) -> Tensor:
    """The attention mask of draft step ``step``. It has one row per chain of drafts.

    A chain starts at one token. As in decoding, a chain sees the first step's keys of all earlier
    tokens, but keys of later steps only within itself.
    """
    blocks = [torch.ones(length - step, length - 1).tril()]
    blocks += [torch.eye(length - step, length - earlier) for earlier in range(2, step + 1)]
    return torch.cat(blocks, dim=1).bool()[None, None]


@torch.no_grad()
def balance_experts(router: nn.Module, _inputs: tuple, output: tuple) -> None:
    """Forward hook: balance the load of experts by the router's bias, as GLM-4.5 does."""
    if router.training:
        used = torch.bincount(output[2].flatten(), minlength=router.num_experts).float()
        router.e_score_correction_bias += 1e-3 * torch.sign(used.mean() - used)


def drop_out(module: nn.Module, _inputs: tuple, output: Tensor) -> Tensor:
    """Forward hook: add dropout, which GLM lacks but so short a text needs."""
    return nn.functional.dropout(output, DROPOUT, module.training)


def new_model(config: Glm4MoeConfig, dropout: Callable | None = drop_out) -> DemoModel:
    """An untrained model. Each block is initially the identity, which speeds up the training."""
    model = DemoModel(config)
    nn.init.normal_(model.model.embed_tokens.weight)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            nn.init.zeros_(parameter)
    for name, module in model.named_modules():
        if isinstance(module, glm.Glm4MoeTopkRouter):
            module.register_forward_hook(balance_experts)
        elif dropout is not None and name.endswith(("embed_tokens", "o_proj", "mlp")):
            module.register_forward_hook(dropout)
    return model


@torch.no_grad()
def continue_text(model: DemoModel, ids: Tensor, count: int, temperature: float = 0.0) -> Tensor:
    """Append ``count`` tokens of the target to ``ids`` (greedy at temperature 0)."""
    cache, last = DynamicCache(), ids
    for _ in range(count):
        logits = model(input_ids=last, **{CACHE: cache}, logits_to_keep=1).logits[:, -1]
        last = logits.argmax(dim=-1, keepdim=True)
        if temperature > 0:
            last = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1)
        ids = torch.cat([ids, last], dim=1)
    return ids


@dataclass
class Run:
    """The data of one run of this script, and the record of its progress."""

    model: DemoModel
    tokenizer: PreTrainedTokenizerFast
    train: Tensor
    held_out: Tensor
    prompts: Tensor
    out: Path
    curve: list[dict] = field(default_factory=list)

    def windows(self, count: int, length: int) -> Tensor:
        """``count`` random pieces of the training text, one per row."""
        starts = torch.randint(len(self.train) - length, (count, 1))
        return self.train[starts + torch.arange(length)]


def prepare(out: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> Run:
    """Collect the text, train a tokenizer unless one is given, and make an untrained model."""
    texts = split_documents(collect_documents())
    if tokenizer is None:
        bpe = ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts[0], SHAPE["vocab_size"], special_tokens=[END_OF_TEXT])
        special = {"eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
        backend = Tokenizer.from_str(bpe.to_str())
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    joined = [END_OF_TEXT.join([*part, ""]) for part in texts]
    train, held_out = (torch.tensor(tokenizer(text).input_ids) for text in joined)
    # Evenly spaced held-out pieces, each within one document.
    pieces = held_out[: len(held_out) // PROMPT * PROMPT].view(-1, PROMPT)
    pieces = pieces[(pieces != tokenizer.eos_token_id).all(dim=1)]
    prompts = pieces[torch.linspace(0, len(pieces) - 1, EVAL_PROMPTS).long()]
    model = new_model(Glm4MoeConfig(**SHAPE, eos_token_id=tokenizer.eos_token_id))
    return Run(model, tokenizer, train, held_out, prompts, out)


def make_optimizers(model: DemoModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices and AdamW for the rest. With Muon, few steps suffice."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = {name: p for name, p in named if ".layers." in name and p.ndim == 2}
    others = [p for name, p in named if name not in matrices]
    # "match_rms_adamw" scales Muon's steps so that one learning rate suits both.
    muon = torch.optim.Muon(matrices.values(), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.1)]


def optimise(run: Run, loss_of: Callable, measure: Callable, minutes: float, peak: float) -> None:
    """Minimise ``loss_of()`` for ``minutes``, with ``REPORTS`` evenly spaced reports."""
    model, optimizers = run.model, make_optimizers(run.model)
    losses, reports, step, progress = [], 0, 0, 0.0
    start = time.process_time()  # processor time, which does not depend on the machine's load
    while progress < 1:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of()
        loss.backward()
        losses.append(loss.item())
        step += 1
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm_up, cosine = min(1.0, 0.02 + progress / 0.03), math.cos(math.pi * progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * warm_up * (0.505 + 0.495 * cosine)
            optimizer.step()
        progress = min(1.0, (time.process_time() - start) / (60 * minutes))
        if progress >= (reports + 1) / REPORTS:
            model.eval()
            loss_mean, seconds = round(sum(losses) / len(losses), 4), round(time.process_time())
            run.curve.append(dict(seconds=seconds, step=step, train_loss=loss_mean, **measure()))
            print(json.dumps(run.curve[-1]), flush=True)
            export(run)  # so that a checkpoint exists after the first report
            losses, reports = [], reports + 1


def joint_losses(model: DemoModel, ids: Tensor) -> list[Tensor]:
    """The target's loss for the next token, and the MTP layer's for the token after that."""
    hidden, losses = model.model(ids, use_cache=False)[0], []
    for ahead, states in enumerate([hidden, *model.draft_states(ids, hidden, depth=1)], start=1):
        logits = model.lm_head(states[:, :-1]).float()
        losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, ahead:].flatten()))
    return losses


@torch.no_grad()
def held_out_losses(run: Run, rows: int | None = None) -> dict[str, float]:
    """The two losses of ``joint_losses`` on (``rows`` of) the held-out text, in nats per token."""
    pieces = run.held_out.split(SEQUENCE)[:-1][:rows]
    losses = torch.tensor([joint_losses(run.model, piece[None]) for piece in pieces])
    main, mtp = losses.mean(dim=0).tolist()
    return {"held_out_loss": round(main, 4), "held_out_mtp_loss": round(mtp, 4)}


def train_jointly(run: Run, minutes: float) -> None:
    """First phase: train the target and the MTP layer on the text."""

    def loss_of() -> Tensor:
        main, mtp = joint_losses(run.model.train(), run.windows(BATCH, SEQUENCE))
        return main + JOINT_MTP_WEIGHT * mtp

    optimise(run, loss_of, lambda: held_out_losses(run, 12), minutes, peak=6e-3)


def draft_loss(model: DemoModel, ids: Tensor) -> Tensor:
    """The cross-entropy of the drafts at each depth to the frozen target's distribution."""
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False)[0]
        wanted = model.lm_head(hidden).float().softmax(dim=-1)
    loss, drafts = torch.zeros(()), model.draft_states(ids, hidden, len(DEPTH_WEIGHTS))
    for depth, (weight, states) in enumerate(zip(DEPTH_WEIGHTS, drafts, strict=True), start=1):
        log_guess = model.lm_head(states).float().log_softmax(dim=-1)
        loss = loss - weight * (wanted[:, depth:] * log_guess).sum(dim=-1).mean()
    return loss


def train_draft(run: Run, minutes: float) -> None:
    """Second phase: train only the MTP layer, on texts that the frozen target generates."""
    model, rows, start = run.model.eval(), [], time.process_time()
    for parameter in model.parameters():
        # The exported target has bfloat16 weights, so the draft must match these.
        parameter.data = parameter.data.bfloat16().float()
    model.requires_grad_(False).model.layers[-1].requires_grad_(True)
    while time.process_time() - start < 60 * minutes * OWN_TEXT_SHARE:
        for temperature in (0.0, 0.7):  # also sampled, because greedy text repeats itself
            prompts = run.windows(64, PROMPT)
            rows.append(continue_text(model, prompts, 2 * NEW_TOKENS, temperature))
    own, greedy = torch.cat(rows), continue_text(model, run.prompts, NEW_TOKENS)

    def loss_of() -> Tensor:
        return draft_loss(model, own[torch.randint(len(own), (2 * BATCH,))])

    minutes *= 1 - OWN_TEXT_SHARE
    optimise(run, loss_of, lambda: {"acceptance": acceptance(model, greedy)}, minutes, peak=2e-3)


@torch.no_grad()
def acceptance(model: DemoModel, ids: Tensor) -> list[float]:
    """For each position, the share of right drafts among those after right drafts only."""
    # ``ids`` end with the target's greedy continuation. The target accepts only these tokens.
    states = model.draft_states(ids, model.model(ids, use_cache=False)[0], len(DEPTH_WEIGHTS))
    # The forward over the prompt gives the first new token, and drafting starts after it.
    first, last = PROMPT - 1, ids.shape[1] - 1 - len(states)
    alive, shares = torch.ones(len(ids), last - first, dtype=torch.bool), []
    for ahead, hidden in enumerate(states, start=2):
        guesses = model.lm_head(hidden[:, first:last]).argmax(dim=-1)
        right = alive & (guesses == ids[:, first + ahead : last + ahead])
        shares.append(round(right.sum().item() / max(1, alive.sum().item()), 4))
        alive = right
    return shares


def evaluate(run: Run) -> dict:
    """Measure the checkpoint on disk with held-out text in float32, and print the results."""
    loading = {"dtype": torch.float32, "output_loading_info": True}
    run.model, info = DemoModel.from_pretrained(run.out, **loading)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise SystemExit(f"{run.out} does not hold the demo model: {info}")
    greedy = continue_text(run.model.eval(), run.prompts, NEW_TOKENS)
    results = {"prompts": EVAL_PROMPTS, "prompt_tokens": PROMPT, "new_tokens": NEW_TOKENS}
    results |= {"acceptance_by_position": acceptance(run.model, greedy), **held_out_losses(run)}
    print(json.dumps(results, indent=2))
    for row in greedy[:: EVAL_PROMPTS // 2]:
        prompt, continuation = run.tokenizer.batch_decode([row[:PROMPT], row[PROMPT:]])
        print(f"--- prompt\n{prompt}\n--- greedy continuation\n{continuation}\n")
    return results


def export(run: Run) -> None:
    """Write the checkpoint in bfloat16 under the names of the released GLM-4.5 checkpoints."""
    model = copy.deepcopy(run.model)
    for parameter in model.parameters():  # the routers' bias is a buffer and stays float32
        parameter.data = parameter.data.bfloat16()
    model.generation_config.pad_token_id = run.tokenizer.pad_token_id
    model.save_pretrained(run.out)
    model.config.update({"architectures": ["Glm4MoeForCausalLM"], "dtype": torch.bfloat16})
    model.config.save_pretrained(run.out)
    run.tokenizer.save_pretrained(run.out)


def write_texts(directory: Path) -> None:
    """Write the training text, each document once, and the held-out text."""
    train, held_out = split_documents(collect_documents())
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train.txt").write_text("\n\n".join(dict.fromkeys(train)), "utf-8")
    (directory / "held-out.txt").write_text("\n\n".join(held_out), "utf-8")


def main() -> None:
    """Train, export and measure a model, or only measure an exported checkpoint."""
    transformers.utils.logging.disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("mtpc/demo"), help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=38.0, help="processor time of training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-only", action="store_true", help="only measure the model in --out")
    parser.add_argument("--texts-only", action="store_true", help="only write the text to --out")
    options = parser.parse_args()
    if options.texts_only:
        write_texts(options.out)
        return
    if options.eval_only:
        evaluate(prepare(options.out, AutoTokenizer.from_pretrained(options.out)))
        return
    torch.manual_seed(options.seed)
    run = prepare(options.out)
    train_jointly(run, JOINT_SHARE * options.minutes)
    train_draft(run, (1 - JOINT_SHARE) * options.minutes)
    export(run)
    record = {"minutes": options.minutes, "seed": options.seed, "torch": torch.__version__}
    record |= {"python": platform.python_version(), "transformers": transformers.__version__}
    record |= {"train_tokens": len(run.train), "held_out_tokens": len(run.held_out)}
    record |= {"processor_seconds": round(time.process_time()), "curve": run.curve}
    (run.out / "LICENSE-NOTE.md").write_text(LICENSE_NOTE.format(**record))
    record["evaluation"] = evaluate(run)
    (run.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
