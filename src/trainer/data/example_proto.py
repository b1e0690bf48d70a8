"""Parses tf.train.Example without TensorFlow, using the message class of tensorflow_datasets.

Importing that package takes a second, so it is imported only when a file is read.
"""

from typing import Any

import numpy as np


def parse_example(data: bytes) -> dict[str, Any]:
    """Returns the features, sorted by name. A feature's value is bytes (if it has one string), a list of bytes, or an
    int64 or float32 array.

    Raises:
      ValueError: `data` is not a tf.train.Example.
    """
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_pb2

    try:
        features = tf_example_pb2.Example.FromString(data).features.feature
    except DecodeError as error:
        raise ValueError(f"not a tf.train.Example ({error})") from error
    if not features:
        raise ValueError("not a tf.train.Example, or one without features")
    return {name: _values(features[name]) for name in sorted(features)}  # a protobuf map has no order


def _values(feature: Any) -> Any:
    if feature.HasField("float_list"):
        return np.array(feature.float_list.value, np.float32)
    if feature.HasField("int64_list"):
        return np.array(feature.int64_list.value, np.int64)
    if not feature.HasField("bytes_list"):
        return b""
    values = list(feature.bytes_list.value)
    return values[0] if len(values) == 1 else values
