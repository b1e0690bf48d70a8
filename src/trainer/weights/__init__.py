"""Models in and out: in the formats of Hugging Face, PEFT, MaxText and this trainer."""
