"""Leviathan for transformers: `import leviathan_ds.hf` makes the Auto classes know it, without remote code.

The two modules beside this one import nothing of ours: an export carries a copy of them.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from leviathan_ds.hf.configuration_leviathan import LeviathanConfig
from leviathan_ds.hf.modeling_leviathan import LeviathanForCausalLM, LeviathanModel, LeviathanPreTrainedModel

AutoConfig.register("leviathan", LeviathanConfig, exist_ok=True)
AutoModel.register(LeviathanConfig, LeviathanModel, exist_ok=True)
AutoModelForCausalLM.register(LeviathanConfig, LeviathanForCausalLM, exist_ok=True)
# `save_pretrained` copies the code beside the weights, and names it in config.json.
LeviathanConfig.register_for_auto_class()
LeviathanModel.register_for_auto_class("AutoModel")
LeviathanForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = ["LeviathanConfig", "LeviathanForCausalLM", "LeviathanModel", "LeviathanPreTrainedModel"]
