"""`Facts` of Qwen 3.5 and 3.6, for the configuration stage."""

from trainer.config.family import Facts
from trainer.models.qwen3_next.facts import FIXES, READS

FACTS = Facts("trainer.models.qwen3_5.family:FAMILY", reads=READS, fixes=FIXES, recurrent=True)
