"""`Facts` of GLM 4.7 Flash, for the configuration stage, the same as DeepSeek's."""

import dataclasses

from trainer.models.deepseek import facts as deepseek

FACTS = dataclasses.replace(deepseek.FACTS, family="trainer.models.glm4_moe_lite.family:FAMILY")
