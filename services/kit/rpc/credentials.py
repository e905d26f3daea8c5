"""Certificates as grpc takes them."""

from typing import Any

import grpc

from services.kit.tls import Material, TlsFiles


def server_credentials(files: TlsFiles, *, is_mutual: bool) -> grpc.ServerCredentials:
    """Return credentials of a server; each new connection gets the certificate that its file holds then.

    Args:
        files: with a certificate.
        is_mutual: whether callers have to show a certificate that one of the authorities signed.
    """
    known = files.current()

    def renewed() -> Any:
        # Called by a thread of grpc for each connection; None says that nothing has changed.
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
    """Return credentials for calls to servers that one of the authorities signed; shows the certificate, if any."""
    return grpc.ssl_channel_credentials(material.authorities, material.key or None, material.certificate or None)


def _server_configuration(material: Material, *, is_mutual: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(material.key, material.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, material.authorities if is_mutual else None)
