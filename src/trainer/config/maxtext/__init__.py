"""The meaning of MaxText's keys here: verdicts on keys that base.yml lacks, MaxText's defaults and base.yml."""
