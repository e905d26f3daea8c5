"""Conversion of certificates to gRPC credentials."""

from typing import Any

import grpc

from twinkle_services.kit.tls import Material, TlsFiles


def server_credentials(files: TlsFiles, *, is_mutual: bool) -> grpc.ServerCredentials:
    """Return credentials of a server that presents the current certificate to each new connection.

    Args:
        files: Files with a certificate.
        is_mutual: Whether callers must present a certificate signed by one of the authorities.
    """
    known = files.current()

    def renewed() -> Any:
        # grpc calls this from its own thread for each connection; None means that nothing changed.
        nonlocal known
        material = files.current()
        if material is known:
            return None
        known = material
        return _server_configuration(material, is_mutual=is_mutual)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(known, is_mutual=is_mutual), renewed, require_client_authentication=is_mutual
    )


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    """Return credentials for calls to servers whose certificates one of the authorities signed."""
    return grpc.ssl_channel_credentials(material.authorities, material.key or None, material.certificate or None)


def _server_configuration(material: Material, *, is_mutual: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, material.authorities if is_mutual else None)
