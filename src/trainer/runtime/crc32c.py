"""The checksums of TFRecord files."""


def masked_crc32c(data: bytes) -> int:
    """Returns the CRC-32C of `data`, masked as in TFRecord files.

    Source: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/lib/hash/crc32c.h
    """
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
