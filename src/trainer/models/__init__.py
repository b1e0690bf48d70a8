"""Models: the transformer, and a folder for each family.

In each folder, `facts.py` declares the properties that the configuration stage needs, without importing JAX;
`family.py` declares all others.
"""

# Maps each decoder_block to the import path of its family's `Facts`. No code outside of this package names a family.
FAMILIES = {
    "deepseek": "trainer.models.deepseek.facts:FACTS",
    "gemma": "trainer.models.gemma.facts:FACTS",
    "gemma2": "trainer.models.gemma2.facts:FACTS",
    "gemma3": "trainer.models.gemma3.facts:FACTS",
    "glm4": "trainer.models.glm4.facts:FACTS",
    "glm4_moe": "trainer.models.glm4_moe.facts:FACTS",
    "glm4_moe_lite": "trainer.models.glm4_moe_lite.facts:FACTS",
    "gpt3": "trainer.models.gpt3.facts:FACTS",
    "gpt_oss": "trainer.models.gpt_oss.facts:FACTS",
    "granite": "trainer.models.granite.facts:FACTS",
    "granite4": "trainer.models.granite4.facts:FACTS",
    "granite_moe": "trainer.models.granite_moe.facts:FACTS",
    "granite_moe_shared": "trainer.models.granite_moe_shared.facts:FACTS",
    "llama2": "trainer.models.llama2.facts:FACTS",
    "llama4": "trainer.models.llama4.facts:FACTS",
    "ministral3": "trainer.models.ministral3.facts:FACTS",
    "mistral": "trainer.models.mistral.facts:FACTS",
    "mistral4": "trainer.models.mistral4.facts:FACTS",
    "mixtral": "trainer.models.mixtral.facts:FACTS",
    "olmo2": "trainer.models.olmo2.facts:FACTS",
    "olmo3": "trainer.models.olmo3.facts:FACTS",
    "phi3": "trainer.models.phi3.facts:FACTS",
    "qwen2": "trainer.models.qwen2.facts:FACTS",
    "qwen3": "trainer.models.qwen3.facts:FACTS",
    "qwen3_5": "trainer.models.qwen3_5.facts:FACTS",
    "qwen3_5_moe": "trainer.models.qwen3_5_moe.facts:FACTS",
    "qwen3_moe": "trainer.models.qwen3_moe.facts:FACTS",
    "qwen3_next": "trainer.models.qwen3_next.facts:FACTS",
    "smollm3": "trainer.models.smollm3.facts:FACTS",
}
