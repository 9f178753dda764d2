"""The vLLM plugin: vLLM's MTP draft classes replaced by `TracedMTP`, where the user asks for it.

Installed with mtpc as an entry point of the group `vllm.general_plugins`. vLLM calls `register` in
each of its processes.
"""

from __future__ import annotations

PLUGIN_NAME = "mtpc"
"""What VLLM_PLUGINS must name."""
ARCHITECTURES = ("MiMoMTPModel", "Glm4MoeMTPModel", "DeepSeekMTPModel", "Qwen3NextMTP")
"""vLLM's names of the draft architectures that are replaced."""


def register() -> None:
    """Put `TracedMTP` in the place of vLLM's draft classes, if VLLM_PLUGINS names mtpc.

    Without VLLM_PLUGINS vLLM loads every plugin that is installed; to be installed is not to be
    asked for, so nothing is changed then. May be called any number of times.
    """
    from vllm import ModelRegistry, envs

    if PLUGIN_NAME not in (envs.VLLM_PLUGINS or ()):
        return
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{__name__}.draft_model:TracedMTP")
