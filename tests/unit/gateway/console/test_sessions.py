"""Tests of cookies, sessions, one-time links, origins and files of the console, with fakes."""

import base64
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from twinkle_services.gateway.console.files import AppFiles, BytesResponse
from twinkle_services.gateway.console.sessions import (
    LINKS_PER_TENANT,
    BrowserSessions,
    Credential,
    LoginLinks,
    check_origin,
    cookie_value,
    session_end,
    set_cookie,
    uses_tls,
)
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.gateway.keys.rules import ApiKey
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import CredentialsInvalid, CredentialsMissing, InvalidField

PEPPER = b'pepper of the tests'
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class OneKey:
    """Verifies one secret."""

    def __init__(self, secret: str = 'tml-1', **fields: Any) -> None:
        self.secret: str = secret
        values: dict[str, Any] = {'display_name': '', 'scopes': frozenset({Scope.TRAIN}), 'create_time': NOW}
        self.key = ApiKey(key_id='key-1', tenant_id='alice', **values | fields)

    async def verify(self, secret: str) -> ApiKey:
        """Return the key of the secret."""
        if secret != self.secret:
            raise CredentialsInvalid()
        return self.key


def sessions_of(keys: OneKey, clock: FakeClock, *, pepper: bytes = PEPPER) -> BrowserSessions:
    return BrowserSessions(cast(Any, keys), PepperedSealer(pepper), clock=clock)


async def cookie_of(sessions: BrowserSessions) -> dict[str, str]:
    """Return the header with the cookie of a new session."""
    return {'cookie': f'other=1; twinkle_console={sessions.seal(await sessions.start("tml-1"))}; last=2'}


async def test_cookie_is_accepted_by_another_gateway_with_the_same_pepper() -> None:
    """A gateway with the same pepper accepts the cookie; a gateway with a different pepper refuses it."""
    clock = FakeClock()
    headers = await cookie_of(sessions_of(OneKey(), clock))
    session = await sessions_of(OneKey(), clock).find(headers)
    assert (session.key.key_id, session.credential.secret) == ('key-1', 'tml-1')
    with pytest.raises(CredentialsInvalid):
        await sessions_of(OneKey(), clock, pepper=b'a different pepper').find(headers)


async def test_session_ends_on_time_and_with_its_key() -> None:
    """A session ends after twelve hours, or as soon as its key is refused."""
    clock = FakeClock()
    keys = OneKey()
    sessions = sessions_of(keys, clock)
    headers = await cookie_of(sessions)
    clock.advance(timedelta(hours=12, seconds=-1))
    assert (await sessions.find(headers)).key.tenant_id == 'alice'
    keys.secret = 'tml-2'
    with pytest.raises(CredentialsInvalid):
        await sessions.find(headers)
    keys.secret = 'tml-1'
    clock.advance(timedelta(seconds=1))
    with pytest.raises(CredentialsInvalid):
        await sessions.find(headers)


async def test_sealed_value_of_another_purpose_is_no_cookie() -> None:
    """A value that the gateway encrypted for another purpose, such as a hub token, is refused as a session."""
    clock = FakeClock()
    sealer = PepperedSealer(PEPPER)
    text = Credential(secret='tml-1', expire_time=clock.now() + timedelta(hours=1)).to_text()
    for sealed in (sealer.seal(text, purpose='hub token'), b'', b'x', b'x' * 7, b'x' * 12, b'x' * 60):
        with pytest.raises((CredentialsInvalid, CredentialsMissing)):
            await sessions_of(OneKey(), clock).find(
                {'cookie': f'twinkle_console={base64.urlsafe_b64encode(sealed).decode()}'}
            )


@pytest.mark.parametrize('secret', ['tml-ü', 'tml-\n', 'x' * 1025])
async def test_key_that_metadata_cannot_contain_is_refused(secret: str) -> None:
    """The login refuses a key that gRPC metadata cannot contain."""
    with pytest.raises(CredentialsInvalid):
        await sessions_of(OneKey(secret), FakeClock()).start(secret)


def test_session_is_not_longer_than_its_key() -> None:
    """A session ends when its key expires or is replaced, whichever is first."""
    hour = timedelta(hours=1)
    assert session_end(NOW, None, None) == NOW + 12 * hour
    assert session_end(NOW, NOW + 3 * hour, NOW + 2 * hour + timedelta(microseconds=5)) == NOW + 2 * hour


@pytest.mark.parametrize('text', ['', 'x', '5', '5 ', '-5 tml-1', 'x tml-1'])
def test_damaged_text_is_no_credential(text: str) -> None:
    """A decrypted text without a time and a key is refused."""
    with pytest.raises(CredentialsInvalid):
        Credential.from_text(text)


def test_cookie_is_found_by_its_exact_name() -> None:
    """Only a cookie with the exact name counts; if there are several, the first one counts."""
    assert cookie_value({'cookie': 'a=1; twinkle_console=x=; twinkle_console=y'}) == 'x='
    assert cookie_value({'cookie': 'xtwinkle_console=1; twinkle_console2=2; twinkle_console'}) == ''
    assert cookie_value({}) == ''


def test_cookie_has_its_attributes() -> None:
    """The cookie is hidden from scripts and other sites, and is sent only over TLS if the login used TLS."""
    text = set_cookie('v', lifetime=timedelta(minutes=1), is_secure=True)
    assert text == 'twinkle_console=v; Path=/console; Max-Age=60; HttpOnly; SameSite=Strict; Secure'
    assert uses_tls({}, 'https')
    assert uses_tls({'origin': 'https://a'}, 'http')
    assert not uses_tls({'origin': 'http://a'}, 'http')


@pytest.mark.parametrize(
    ('headers', 'is_accepted'),
    [
        ({'host': 'a:1'}, True),
        ({'host': 'a:1', 'origin': 'http://a:1'}, True),
        ({'host': 'A:1', 'origin': 'https://a:1'}, True),
        ({'host': '[::1]:1', 'origin': 'http://[::1]:1'}, True),
        ({'host': 'a:1', 'origin': 'http://a'}, False),
        ({'host': 'a:1', 'origin': 'http://a:1.evil'}, False),
        ({'host': 'a:1', 'origin': 'http://evil/a:1'}, False),
        ({'host': 'a:1', 'origin': 'null'}, False),
        ({'host': '', 'origin': ''}, False),
        ({'origin': 'http://a'}, False),
    ],
)
def test_origin_must_equal_the_host(headers: dict[str, str], *, is_accepted: bool) -> None:
    """A request with an origin is accepted only if the origin has the same host and port."""
    if is_accepted:
        check_origin(headers)
        return
    with pytest.raises(InvalidField) as caught:
        check_origin(headers)
    assert caught.value.field == 'origin'


def test_link_is_used_once() -> None:
    """A link returns its key once."""
    links = LoginLinks(clock=FakeClock())
    text, _ = links.create('alice', 'tml-1')
    assert links.redeem(text) == 'tml-1'
    with pytest.raises(CredentialsInvalid):
        links.redeem(text)


def test_link_expires_and_leaves_memory() -> None:
    """A link is refused after ten minutes, and the creation of the next link removes it from memory."""
    clock = FakeClock()
    links = LoginLinks(clock=clock)
    text, expire_time = links.create('alice', 'tml-1')
    assert expire_time == clock.now() + timedelta(minutes=10)
    for _ in range(3):
        links.create('bob', 'tml-2')
    clock.advance(timedelta(minutes=10))
    with pytest.raises(CredentialsInvalid):
        links.redeem(text)
    links.create('alice', 'tml-1')
    assert links.count == 1


def test_tenant_keeps_its_newest_links() -> None:
    """A further link replaces its tenant's oldest link, and no link of another tenant."""
    links = LoginLinks(clock=FakeClock())
    other, _ = links.create('bob', 'tml-2')
    texts = [links.create('alice', 'tml-1')[0] for _ in range(LINKS_PER_TENANT + 2)]
    assert links.count == LINKS_PER_TENANT + 1
    for text in texts[:2]:
        with pytest.raises(CredentialsInvalid):
            links.redeem(text)
    assert {links.redeem(text) for text in texts[2:]} == {'tml-1'}
    assert links.redeem(other) == 'tml-2'


def test_compressed_variant_is_sent_to_browsers_that_accept_it(tmp_path: Path) -> None:
    """NAME.gz is sent for NAME if the browser accepts gzip, and cannot be requested by its own name."""
    (tmp_path / 'index.html').write_bytes(b'page')
    (tmp_path / 'index.html.gz').write_bytes(b'packed')
    files = AppFiles(tmp_path)
    packed, plain = files.find('index.html', accept_encoding='br, GZIP'), files.find('index.html')
    absent = files.find('index.html.gz')
    assert isinstance(packed, BytesResponse)
    assert isinstance(plain, BytesResponse)
    assert isinstance(absent, BytesResponse)
    assert (packed.data, packed.headers['content-encoding'], packed.headers['vary']) == (
        b'packed',
        'gzip',
        'accept-encoding',
    )
    assert plain.data == b'page'
    assert 'content-encoding' not in plain.headers
    assert absent.status == 404
