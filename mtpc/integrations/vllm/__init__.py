"""The vLLM plugin: replaces vLLM's MTP draft classes with `TracedMTP`, if the user asks for it.

It also adds the value "mtpc" of vLLM's option `quantization`, see `plain_linears`.

It is installed with mtpc as an entry point of the group `vllm.general_plugins`. vLLM calls
`register` in each of its processes.
"""

from __future__ import annotations

PLUGIN_NAME = "mtpc"
"""The name that VLLM_PLUGINS must contain."""


def register() -> None:
    """Tell vLLM of `TracedMTP` and `PlainLinears`, if VLLM_PLUGINS contains mtpc.

    Without VLLM_PLUGINS, vLLM loads every installed plugin. The user has then not asked for this
    one, so it changes nothing. vLLM may call this function several times.
    """
    from vllm import ModelRegistry, envs

    if PLUGIN_NAME not in (envs.VLLM_PLUGINS or ()):
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from mtpc.integrations.vllm.plain_linears import PlainLinears
    from mtpc.integrations.vllm.rules import HOST_RULES

    register_quantization_config(PLUGIN_NAME)(PlainLinears)
    for architecture in HOST_RULES:
        ModelRegistry.register_model(architecture, f"{__name__}.draft_model:TracedMTP")
