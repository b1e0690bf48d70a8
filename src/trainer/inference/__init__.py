"""Generating text with a trained model."""

from trainer.inference.engine import Engine
from trainer.inference.max_engine import MaxEngine
from trainer.inference.prompts import Packed
from trainer.inference.sample import SamplePrompt, sample_prompt, sample_text
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Event, Scheduler
from trainer.inference.service import Service
from trainer.inference.state import DecodeState, Prefix, Result
from trainer.inference.text import Chat, TextStream, tokens_of
from trainer.inference.weights import canonical

__all__ = [
    "Chat",
    "DecodeState",
    "Engine",
    "Event",
    "MaxEngine",
    "Packed",
    "Prefix",
    "Result",
    "SamplePrompt",
    "Sampling",
    "Scheduler",
    "Service",
    "TextStream",
    "canonical",
    "sample_prompt",
    "sample_text",
    "tokens_of",
]
