"""Conversion of the parts that the upload streams of all services have in common: chunks, checksums and digests.

`twinkle_services.kit.resumable_uploads` compares the bytes with them in a thread, because SHA-256 of a chunk is slow.
"""

import re

from twinkle.api.tensor.v1 import tensor_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import not_negative
from twinkle_services.kit.upload_folder import UploadChunk

_BLAKE3 = re.compile(r'[0-9a-f]{64}')
_SHA256_BYTES = 32


def upload_chunk_from_proto(chunk: tensor_pb2.TensorChunk) -> UploadChunk:
    """Convert the next bytes of an upload, whose field in the request is `chunk`. The checksums are not compared.

    Raises:
        InvalidField: The offset is negative, or the SHA-256 digest has the wrong size.
    """
    return UploadChunk(
        offset=not_negative(chunk.offset, 'chunk.offset'),
        data=chunk.data,
        checksum=chunk.checksum if chunk.HasField('checksum') else None,
        sha256=_sha256_from_proto(chunk.sha256, 'chunk.sha256'),
    )


def blake3_from_proto(digest: str, field: str) -> str:
    """Return a hexadecimal blake3 digest, or an empty text if none was sent.

    Raises:
        InvalidField: The text is no such digest.
    """
    if digest and not _BLAKE3.fullmatch(digest):
        problem = f'must be a blake3 digest of 64 hexadecimal characters in lower case, got {len(digest)} characters'
        raise InvalidField(field, f'{problem}; send SHA-256 in `sha256` instead, or no digest')
    return digest


def sha256_from_proto(digest: bytes, field: str) -> str:
    """Return a SHA-256 digest in hexadecimal, or an empty text if none was sent.

    Raises:
        InvalidField: The digest has the wrong size.
    """
    return _sha256_from_proto(digest, field).hex()


def _sha256_from_proto(digest: bytes, field: str) -> bytes:
    if len(digest) not in (0, _SHA256_BYTES):
        problem = f'must be the {_SHA256_BYTES} bytes of a SHA-256 digest, not hexadecimal, got {len(digest)} bytes'
        raise InvalidField(field, f'{problem}; leave it empty to send no digest')
    return digest
