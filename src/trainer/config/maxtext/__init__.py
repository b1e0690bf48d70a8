"""What MaxText's keys mean here: verdicts on keys that base.yml lacks, its defaults, its base.yml."""
