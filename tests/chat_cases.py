"""Conversations that tests of fine-tuning share."""

SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
OTHER = [{"role": "user", "content": "And é?"}, {"role": "assistant", "content": "OK"}]
PLACE = "data.jsonl, line 1"
