"""The schedule of DiLoCo in words."""

import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.capabilities.diloco_keys import timetable
from trainer.config.load import load


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, "every 7 steps and at the end"),
        (
            {"num_diloco_fragments": 3, "num_communication_overlapping_steps": 1},
            "in 3 fragments: every 7 steps, fragment 1 after step 2, fragment 2 after step 4, fragment 0 after step "
            "7 (islands merge a fragment 1 step later), and all at the end",
        ),
        (
            {"num_diloco_fragments": 7, "base_num_decoder_layers": 6},
            "in 7 fragments: every 7 steps, fragment 1 after step 1, fragment 2 after step 2, fragment 3 after step "
            "3, ..., fragment 0 after step 7, and all at the end",
        ),
    ],
)
def test_the_timetable_of_fragments(keys, expected):
    keys = {"enable_diloco": True, "enable_streaming_diloco": True, "diloco_sync_period": 7} | keys
    assert timetable(load(arguments(ALL_COMBINATIONS[0], **keys)).config) == expected
