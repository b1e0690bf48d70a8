"""What the first stage asks about GLM 4.7 Flash: what it asks about DeepSeek."""

import dataclasses

from trainer.models.deepseek import facts as deepseek

FACTS = dataclasses.replace(deepseek.FACTS, family="trainer.models.glm4_moe_lite.family:FAMILY")
