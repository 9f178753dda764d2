"""Writes docs/conformance.md: what the sources of the mission ask, and the test that shows it.

    cd tests && python -m helpers.conformance > ../docs/conformance.md

`tests/docs/test_conformance.py` compares the page, and finds each test and each file in the tree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.places import TESTS


@dataclass(frozen=True)
class Row:
    """One requirement.

    Attributes:
        says: the requirement, in one line.
        met: "yes", "partly" or "no".
        how: where it is met, or why it is not.
        tests: "file::test" below tests/; "peers/FILE.py" is a script that needs the host itself.
    """

    says: str
    met: str
    how: str
    tests: Sequence[str] = ()


SEAMS, V4 = "integrations/test_sglang_seams.py", "integrations/test_sglang_v4.py"
STEPS = "integrations/test_sglang_steps.py"
CONTRACT, PLUGIN = "peers/sglang_contract.py", "peers/sglang_plugin.py"
THEOREM = "test_theorem.py::test_speculative_output_equals_plain_decoding"
PUBLIC = "engine/test_public_faults.py"

SOURCES: dict[str, tuple[Row, ...]] = {
    "DeepSeek-V3's MTP in SGLang (ATOM)": (
        Row(
            "An external package whose EntryClass overrides SGLang's draft by its exact name",
            "yes",
            "`mtpc/integrations/sglang/models/drafts.py`",
            (
                CONTRACT,
                "integrations/test_sglang_package.py::test_the_entry_point_is_there_and_light",
            ),
        ),
        Row(
            "The wrapper is thin, and reuses one core draft",
            "yes",
            "`HostedDraft` over `TracedDraft`, which is made by the family's own wiring",
            ("integrations/test_traced_draft.py::test_layer_is_the_oracles",),
        ),
        Row(
            "A package for the target model, too",
            "yes",
            "`mtpc/integrations/sglang/step_models/targets.py`, for `MTPC_STEP`: SGLang's model "
            "object is empty, and the worker runs mtpc's steps; see "
            "[verify in one graph](#verify-and-propose-as-one-graph-in-a-host)",
            (f"{STEPS}::test_texts_are_those_of_plain_decoding", PLUGIN),
        ),
        Row(
            "Embedding and head are the target's",
            "yes",
            "`set_embed_and_head`, `set_embed`; a layer's own ones are kept",
            (CONTRACT, f"{SEAMS}::test_a_layer_of_a_chain_has_its_own_head_and_features"),
        ),
        Row(
            "The draft reads the target's hidden states of the batch",
            "yes",
            "`forward_batch.spec_info.hidden_states`",
            (CONTRACT,),
        ),
        Row(
            "Weights come by a load path of the draft alone",
            "yes",
            "`TracedDraft.load_weights` takes the layer's tensors and ignores the rest",
            ("integrations/test_traced_draft.py::test_weights_that_do_not_fit_are_named",),
        ),
        Row(
            "Target and draft do not see each other's run-time state",
            "yes",
            "one `DraftRun` for each draft; a chain's graph calls the modules of its own draft",
            (
                "integrations/test_traced_draft.py::test_drafts_of_one_process_share_nothing",
                "host/test_isolation.py::test_one_process_has_several_models",
            ),
        ),
        Row(
            "The draft runs on SGLang's aiter backend, prompts included",
            "yes",
            "three-dimensional queries, and expanded heads in a prompt's rows; over a fake of the "
            "backend, never on an AMD GPU",
            (f"{SEAMS}::test_latent_attention_on_the_aiter_backend",),
        ),
        Row(
            "Temperature and top-p hold on ROCm",
            "yes",
            "`MTPC` turns rejection sampling on and hands over what drafts were drawn from; on a "
            "CPU it refuses such requests",
            (
                f"{SEAMS}::test_rocm_verifies_by_rejection_sampling",
                f"{SEAMS}::test_drafts_come_with_what_they_were_drawn_from",
                CONTRACT,
                f"{SEAMS}::test_a_request_with_sampling_is_refused_on_a_cpu",
            ),
        ),
        Row(
            "Tensor parallelism and quantised weights",
            "yes",
            "SGLang's own layers, which a draft model and the graph of `MTPC` call; in SGLang's "
            "whole engine, on two ranks and in FP8 blocks, never with NCCL",
            (
                *(CONTRACT, PLUGIN),
                "integrations/test_host_layers.py::test_hosts_layers_are_the_oracles",
                "integrations/test_draft_chain.py::test_a_chain_over_the_hosts_layers",
                f"{SEAMS}::test_a_quantised_draft_is_chained_as_one_graph",
            ),
        ),
        Row(
            "Accuracy and acceptance of the released model",
            "no",
            "no released checkpoint fits here",
        ),
    ),
    "DeepSeek-V4's MTP in SGLang (ATOM)": (
        Row(
            "The draft is fed the streams from before the head that joins them",
            "yes",
            "mtpc's engine: `StreamTarget`, `StreamDraft` and `StreamReadout` of the family",
            (
                "models/test_deepseek_v4.py::test_rows_equal_transformers_uncached",
                "models/test_wiring.py::test_rows_equal_the_released_wiring",
            ),
        ),
        Row(
            "Embedding and head are shared, and released names load",
            "yes",
            "`mtpc/models/families/deepseek_v4.py`",
            (
                "models/test_deepseek_v4.py::test_released_entries_and_names",
                "weights/test_block_scales.py::test_deepseek_v4_as_it_is_released",
            ),
        ),
        Row(
            "The class `DeepseekV4ForCausalLMNextN` in SGLang",
            "partly",
            "SGLang's V4 backend has the window (`forward` with `compress_ratio=0`), and hands the "
            "streams on as flat rows; over a fake of its layers and backend, never with SGLang "
            "itself. Its pool holds keys as FP8, as it does for SGLang's own draft",
            (
                f"{V4}::test_drafts_are_those_of_mtpcs_engine",
                f"{V4}::test_sglangs_config_is_read_as_the_checkpoints",
                f"{V4}::test_what_sglangs_backend_does_not_compute_is_refused",
            ),
        ),
        Row(
            "Metadata is not made by the host in each step",
            "yes",
            "the graph computes it; the verifier refuses what waits for the host",
            (
                "step/test_step.py::test_metadata_in_closed_form",
                "gpu/test_null_device.py::test_one_replay_a_step_and_a_host_write_a_page",
            ),
        ),
        Row(
            "FP8 and FP4 weights as released",
            "partly",
            "read by block; FP4 becomes codes of 8 bits. No released file has been read",
            (
                "weights/test_block_scales.py::test_fp8_runs_as_the_weights_it_stands_for",
                f"{V4}::test_fp8_blocks_as_released",
            ),
        ),
    ),
    "Qwen3-Next's MTP (ATOM), and its review": (
        Row(
            "`slot_mapping` has a row for each request and each verified token",
            "yes",
            "declared by request, and grown by the pass `resize-metadata`",
            (
                "program/test_open_sizes.py::test_shapes_have_open_sizes",
                "step/test_step.py::test_metadata_in_closed_form",
            ),
        ),
        Row(
            "Capture and replay use the same slices",
            "yes",
            "they are one graph",
            ("gpu/test_null_device.py::test_replay_equals_eager",),
        ),
        Row(
            "Padded rows have harmless state indices",
            "yes",
            "the scratch slot, and slot -1",
            (
                THEOREM,
                "step/test_step.py::test_padding_behind_a_request_with_room_has_no_slot",
            ),
        ),
        Row(
            "Recurrent state rolls back after a rejection",
            "yes",
            "certain rows advance it, and the next step replays the accepted ones",
            (
                "ops/test_gated_delta.py::test_rejected_rows_leave_no_trace",
                "models/test_recurrent.py::test_speculative_output_equals_plain_decoding",
            ),
        ),
        Row(
            "Graph mode is as accurate as eager mode",
            "partly",
            "on the cpu backend bit for bit in bfloat16; on GPUs with `batch_invariant`. No task "
            "score of a released model",
            (
                "cpu/test_backend.py::test_compiled_equals_plain_decoding",
                "gpu/test_batch_invariance.py::test_steps",
            ),
        ),
        Row(
            "Launch by `--speculative-config`, tensor parallelism, an OpenAI server",
            "yes",
            "`mtpc serve`; several ranks on CPUs alone",
            (
                "server/test_server.py::test_completion",
                "ranks/test_tensor_parallel.py::test_text_is_that_of_plain_decoding",
            ),
        ),
    ),
    "transformers' MTP": (
        Row(
            "`generate(use_mtp=True)`",
            "yes",
            "`Generator.generate`, and `model.generate` after `attach`; without either it is "
            "transformers' own loop",
            ("integrations/test_transformers_calls.py::test_use_mtp_never_runs_the_hosts_loop",),
        ),
        Row(
            "Paged continuous batching does not bypass MTP in silence",
            "yes",
            "`Generator.generate_batch`, and `model.generate_batch` after `attach`, run on mtpc's "
            "engine; transformers' manager and `paged` are refused by name. Without `attach` mtpc "
            "sees no call of the model's",
            (
                "integrations/test_transformers_calls.py::test_use_mtp_never_runs_the_hosts_loop",
                "integrations/test_transformers_calls.py::test_prompts_of_any_lengths",
            ),
        ),
        Row(
            "MTP layers stand outside of the base model, and load from its checkpoint",
            "yes",
            "`mtpc/models/mtp_layers.py`",
            ("models/test_objects.py::test_an_object_decodes_as_its_directory",),
        ),
        Row(
            "Greedy and sampled decoding",
            "yes",
            "sampling by noise that is a function of seed, position and token",
            (
                "integrations/test_transformers_generate.py::test_tokens",
                "sampling/test_statistics.py::test_emitted_joint_is_the_targets",
            ),
        ),
        Row(
            "Drafts equal transformers' for K = 1, 2, 3",
            "yes",
            "",
            ("models/test_drafts.py::test_drafts_equal_transformers_mtp",),
        ),
        Row(
            "Batches above one, and recurrent models",
            "yes",
            "more than transformers: batches are ragged, and padded on the left",
            ("integrations/test_transformers_generate.py::test_tokens",),
        ),
    ),
    "Step-3.5's chained MTP": (
        Row(
            "Layer i is fed what layer i - 1 gave, layer 0 the target's",
            "yes",
            "`mtpc/step/chaining.py`",
            ("models/test_drafts.py::test_several_layers_chain_truly",),
        ),
        Row(
            "The state from before the norm is what is chained",
            "yes",
            "the family's `first_features` and `next_features`",
            ("models/test_wiring.py::test_rows_equal_the_released_wiring",),
        ),
        Row(
            "Each layer has a norm and a head of its own",
            "yes",
            "",
            ("models/test_wiring.py::test_own_embeddings_and_heads_are_used",),
        ),
        Row(
            "`Step3p5MTP` in SGLang, a layer for each draft (`draft_model_idx`)",
            "yes",
            "SGLang chains the layers; over a fake of SGLang's layers, because SGLang's CPU build "
            "does not run the target",
            (f"{SEAMS}::test_a_layer_of_a_chain_has_its_own_head_and_features",),
        ),
        Row(
            "More drafts than layers",
            "yes",
            "the last layer is used again",
            ("models/test_chained_families.py::test_fewer_drafts_use_fewer_layers", THEOREM),
        ),
    ),
}

FAULTS = (
    Row(
        "An empty batch, or a dummy one after a request has finished, writes no KV",
        "yes",
        "",
        (f"{PUBLIC}::test_a_step_of_no_request_writes_no_kv",),
    ),
    Row(
        "K changes to 0 and back between steps, on recurrent state",
        "yes",
        "",
        ("engine/test_tiers.py::test_k_may_change_at_every_step",),
    ),
    Row(
        "Two requests that are longer than a ring",
        "yes",
        "",
        ("models/test_ring_cache.py::test_rings_read_as_paged_caches_do",),
    ),
    Row(
        "Three requests in a bucket of eight: every buffer of slots is padded harmlessly",
        "yes",
        "",
        (f"{PUBLIC}::test_three_requests_in_a_bucket_of_eight",),
    ),
    Row(
        "K + 1 above any constant of a kernel",
        "yes",
        "",
        (
            "ops/test_gated_delta.py::test_rounds_of_any_width",
            "cpu/test_kernels.py::test_edges_of_pages_and_splits",
            "gpu/test_aiter_limits.py::test_every_part_has_one_kernel",
        ),
    ),
    Row(
        "The draft layer's KV is as long as the committed text after each step",
        "yes",
        "",
        (
            f"{PUBLIC}::test_three_requests_in_a_bucket_of_eight",
            "engine/test_tiers.py::test_every_layer_keeps_its_kv_at_any_k",
        ),
    ),
    Row(
        "All drafts rejected in each step, with log-probabilities",
        "yes",
        "",
        (f"{PUBLIC}::test_every_draft_rejected_leaves_log_probabilities",),
    ),
    Row(
        "Prefix hits at each edge of a page, with MTP and without",
        "yes",
        "",
        (f"{PUBLIC}::test_prefix_hits_at_each_edge_of_a_page",),
    ),
    Row(
        "Target and drafts of other options in one process, in both orders, a failed load between",
        "yes",
        "",
        ("host/test_isolation.py::test_one_process_has_several_models",),
    ),
    Row(
        "Rejected KV is not visible to later drafts",
        "yes",
        "",
        ("models/test_drafts.py::test_drafts_after_rejections_at_every_position",),
    ),
    Row(
        "The step after a partial rejection",
        "yes",
        "",
        ("test_theorem.py::test_the_step_after_a_partial_rejection",),
    ),
    Row(
        "A stale artifact is not loaded",
        "yes",
        "",
        ("cache/test_keys.py::test_every_option_is_known_to_be_in_the_key_or_not",),
    ),
    Row(
        "Steps of one pool do not overlap in memory",
        "yes",
        "",
        ("program/test_memory_budget.py::test_steps_share_a_pool_without_overlap",),
    ),
    Row(
        "Python numbers are not frozen into a captured step",
        "yes",
        "",
        ("gpu/test_null_device.py::test_what_a_graph_would_freeze_is_refused",),
    ),
)
"""Of public engines, by issue trackers and reviews."""

ONE_GRAPH = """
mtpc's own engine runs verify, acceptance and all drafts of an iteration as one graph, and `mtpc.compile_host` gives the
same graph to a host that owns scheduler and KV pool ([embedding.md](embedding.md)). In SGLang 0.5.23 the algorithm
`MTPC_STEP` runs it ([embedding-sglang.md](embedding-sglang.md#the-whole-iteration-as-one-graph)), for dense models,
experts and hybrids, and samples (`integrations/test_sglang_steps.py`, `peers/sglang_plugin.py --drafts mtpc-step`). In
vLLM 0.32 the worker class `StepWorker` does ([embedding-vllm.md](embedding-vllm.md#the-whole-iteration-as-one-graph)),
for the same kinds of models (`integrations/test_vllm_steps.py`, `peers/vllm_steps.py`). The seams, by the hosts'
sources:

| seam | what it can carry | what mtpc does, or what stops it |
|---|---|---|
| SGLang `SpeculativeAlgorithm.register` (`speculative/spec_registry.py:234`) | a worker of our own. `forward_batch_generation` gets the batch, and returns tokens, accepted lengths and the next `EagleDraftInput` (`speculative/eagle_worker_v2.py:1416`) | `MTPC_STEP`. Slots of `req_to_token` are mtpc's request slots, and pages are SGLang's |
| SGLang `SGLANG_EXTERNAL_MODEL_PACKAGE` | a class for each model | draft models; and for `MTPC_STEP` an empty target, so that weights exist once. A model is called for one forward, and acceptance lies outside of it: so the worker has the step |
| SGLang `get_speculative_worker_cls`, `get_speculative_graph_runner_cls` (`platforms/interface.py:192-211`) | the same worker; and a runner for the phases `draft_decode` and `draft_extend` | not used. SGLang asks out-of-tree platforms alone (`speculative/spec_info.py:307`): mtpc would have to stand for the device, in place of CUDA or ROCm. There is no phase of verification |
| vLLM `ModelRegistry.register_model` | draft models: what mtpc uses | a model is called for one forward; acceptance lies outside of it. The V2 runner captures what it calls (`v1/worker/gpu/spec_decode/target_dependent_ar/speculator.py:109`) |
| vLLM `worker_cls` (`config/parallel.py:305`) | a worker of our own (`v1/worker/worker_base.py:44`): `execute_model` gets the scheduler's output, blocks included, and returns tokens (`v1/engine/core.py:668`); `take_draft_token_ids` hands the drafts back (`:694`); `get_kv_cache_spec` says what a block costs | `StepWorker`, without a model runner of vLLM's |
| vLLM `logits_processors`, `validate_params` (`v1/engine/input_processor.py:177`) | a check of each request where it is admitted | `StepRequests`: a worker cannot end one request |
| vLLM platform plugins (`platforms/interface.py`) | the same worker, as a platform's default | not used: mtpc would have to stand for the device |
"""  # noqa: E501

NEVER_RUN = """
- **AMD GPUs**: no HIP graph, no function of aiter, no RCCL exchange. What is written for them is tested by contract.
- **Hosts on a GPU**: neither plugin. SGLang's CUDA graphs over a traced draft, mtpc's whole steps, vLLM's V2 runner.
- **Several GPUs**: the tests of two GPUs have been skipped everywhere so far.
- **Released checkpoints** of the five sources' models: none fits the machines of the project. Tiny models of the same
  classes, and one real model of 0.5B parameters without MTP layers, stand for them.
- **vLLM on torch 2.14**: vLLM 0.33, which pins torch 2.14.0, has no CPU build; the newest one, 0.32.0, is for torch
  2.13. SGLang runs on its own torch 2.14.1.
"""  # noqa: E501


def table(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lines = ["| what is asked | met | where, or why not | shown by |", "|---|---|---|---|"]
    for row in rows:
        tests = ", ".join(f"`{test}`" for test in row.tests) or "-"
        lines.append(f"| {row.says} | {row.met} | {row.how or '-'} | {tests} |")
    return "\n".join(lines)


def page() -> str:
    """The page."""
    parts = [
        "# Conformance\n\nWhat the sources of this project ask, where mtpc meets it, and the test "
        "that shows it. Tests are below\n`tests/`; those in `peers/` need the host itself. "
        "`tests/helpers/conformance.py` writes this page.",
    ]
    parts += [f"## {source}\n\n{table(rows)}" for source, rows in SOURCES.items()]
    parts.append(f"## Faults of public engines, as cases\n\n{table(FAULTS)}")
    parts.append(f"## Verify and propose as one graph, in a host\n{ONE_GRAPH.rstrip()}")
    parts.append(f"## Beside the hosts\n\n{beside_the_hosts()}")
    parts.append(f"## What has never run\n{NEVER_RUN.rstrip()}")
    return "\n\n".join(parts) + "\n"


def beside_the_hosts() -> str:
    """What `tests/peers` has recorded, as a table."""
    lines = [
        "What `--record` of the scripts below `tests/peers` has kept. Texts and accepted drafts "
        "are equal in both\nprograms: the host with its own draft and with mtpc's; or, for "
        "`mtpc-step`, the host and mtpc's own engine.\n",
        "| script: checkpoint, what ran | host | equal texts | accepted at each position | of |",
        "|---|---|---|---|---|",
    ]
    found = json.loads((TESTS / "peers" / "results.json").read_text())
    for name, ran in found.items():
        script, _, case = name.partition(": ")
        equal, all_texts = ran["texts"]
        accepted = ", ".join(map(str, ran["accepted"]))
        lines.append(
            f"| `{script}`: {case} | {ran['host']} | {equal} of {all_texts} | {accepted} | "
            f"{ran['drafts']} |"
        )
    return "\n".join(lines)


def rows() -> list[Row]:
    """All rows."""
    return [*(row for found in SOURCES.values() for row in found), *FAULTS]


if __name__ == "__main__":
    print(page(), end="")
