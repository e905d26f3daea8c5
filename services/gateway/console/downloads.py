"""Downloads of checkpoints as one file, which the browser writes to its disk while it arrives."""

from contextlib import aclosing

from twinkle_services.gateway.catalogue.grpc import GrpcCheckpoints
from twinkle_services.gateway.catalogue.paths import NATIVE_SCHEME
from twinkle_services.gateway.console.rules import check_origin
from twinkle_services.gateway.console.sessions import BrowserSessions
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.http.archives import ByteRange, FileResponse
from twinkle_services.gateway.http.call import HttpCall, Response
from twinkle_services.kit.authority import require_scope
from twinkle_services.kit.caller import Caller


class CheckpointDownloads:
    """Serves the archives of checkpoints to browsers with a session."""

    def __init__(self, checkpoints: GrpcCheckpoints, sessions: BrowserSessions) -> None:
        self._checkpoints = checkpoints
        self._sessions = sessions

    async def identify(self, call: HttpCall) -> Caller:
        """Return the caller of the request's key, which is also checked at intervals while the file is sent.

        Raises:
            CredentialsMissing, CredentialsInvalid: there is no valid key.
            InvalidField: the request comes from a page of another site.
            ScopeMissing: the key lacks the scope `train`, which the same method requires over gRPC.
        """
        caller = await self._sessions.caller_of(call.headers)
        check_origin(call.headers)
        require_scope(caller, Scope.TRAIN)
        return caller

    async def serve(self, call: HttpCall) -> Response:
        """Return the archive of a checkpoint that the caller may read.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            DomainError: the checkpoint is damaged, or the service cannot be reached.
        """
        run_id, name = call.path_values['run_id'], call.path_values['name']
        path = f'{NATIVE_SCHEME}{run_id}/weights/{name}'
        async with aclosing(self._checkpoints.archive(path, offset=0)) as parts:
            first = await anext(parts)
        content = ByteRange(0, first.size_bytes)
        return FileResponse(self._checkpoints, path, content, f'{run_id}-{name}.tar', first.digest)
