"""Who may speak to a server: names that lead here, and pages that a browser says something about."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from shared.browsers import BrowserRules, Foreign, check_everybody, check_host_name, check_origin, normal_origin
from shared.errors import StartupError

NAMES = ("0.0.0.0", "dispatcher", "GPU_1.Lan")
CHAT = "https://chat.example"
HOST, ORIGIN = Foreign.HOST, Foreign.ORIGIN


def judge(rules: BrowserRules, *headers: tuple[str, str], target: str = "/v1/models") -> Foreign | None:
    return rules.judge(target, CIMultiDict(headers))


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:8000", "192.168.1.5:80", "0.0.0.0:8000", "127.0.0.1.", "10.1.2.3:", "127.1:80"),
        *("[::1]", "[::1]:8000", "[FE80::1%25eth0]:8000", "[::ffff:127.0.0.1]"),
        *("localhost", "LOCALHOST:8000", "localhost.", "localhost.:8000", "a.b.localhost:1", "x.LocalHost."),
        *("dispatcher:8000", "Dispatcher", "gpu_1.lan", "gpu_1.LAN.:8000"),
    ],
)
def test_what_no_stranger_can_have_made_lead_here_is_an_own_name(host: str) -> None:
    assert judge(BrowserRules(NAMES), ("Host", host)) is None


@pytest.mark.parametrize(
    "host",
    [
        *("", " ", "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"),
        *("notlocalhost", "localhost..", "x.dispatcher", "dispatcher.x", "gpu_1", "gpu_1.lan.."),
        *("::1", "[::1", "[evil.example]", "127.0.0.1:8000:1", "127.0.0.1:http", "127.0.0.1:999999"),
        *("user@127.0.0.1", "127.0.0.1, evil.example", "127.0.0.1/", "127.0.0.1#", "http://127.0.0.1", "127.0.0.256"),
        *("ⅼocalhost", "localhost\x00", "[localhost", "١٢٧.0.0.1"),
    ],
)
def test_every_other_name_is_foreign_without_keys_and_none_is_with_them(host: str) -> None:
    assert judge(BrowserRules(NAMES), ("Host", host)) is HOST
    assert judge(BrowserRules(None), ("Host", host)) is None


@given(st.sampled_from(["localhost", "127.0.0.1", "dispatcher"]), st.text("abc.-", min_size=1, max_size=8))
def test_no_name_is_own_because_it_begins_or_ends_like_one(own: str, more: str) -> None:
    for host in (f"{own}.{more}example", f"{own}{more}x", f"evil-{own}", f"{more}x@{own}"):
        assert judge(BrowserRules(NAMES), ("Host", host)) is HOST, host


def test_who_names_no_host_is_no_browser() -> None:
    assert judge(BrowserRules(())) is None
    assert judge(BrowserRules(()), ("Origin", "http://localhost")) is ORIGIN


@pytest.mark.parametrize(
    ("target", "foreign"),
    [
        ("http://127.0.0.1:8000/v1/models", None),
        ("HTTP://LOCALHOST/", None),
        ("*", None),
        ("//evil.example/", None),  # a path
        ("http://evil.example/v1/models", HOST),
        ("http://127.0.0.1@evil.example/", HOST),
        ("http://evil.example?127.0.0.1", HOST),
        ("http://evil.example#/", HOST),
        ("http:///v1/models", HOST),
        ("evil.example:443", HOST),
    ],
)
def test_a_target_with_a_host_must_name_an_own_one_too(target: str, foreign: Foreign | None) -> None:
    assert judge(BrowserRules(()), ("Host", "127.0.0.1:8000"), target=target) is foreign
    assert judge(BrowserRules(()), ("Host", "evil.example"), target=target) is HOST


@pytest.mark.parametrize(("port", "foreign"), [(8000, None), (8001, ORIGIN)])
def test_a_page_must_be_of_the_host_in_the_target_too(port: int, foreign: Foreign | None) -> None:
    headers = [("Host", "127.0.0.1:8000"), ("Origin", "http://127.0.0.1:8000")]
    assert judge(BrowserRules(()), *headers, target=f"http://127.0.0.1:{port}/") is foreign


@pytest.mark.parametrize(
    ("host", "origin", "is_own"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", True),
        ("localhost", "http://localhost", True),
        ("localhost:80", "http://localhost", True),
        ("gpu_1.lan", "https://gpu_1.lan", True),  # behind a proxy with TLS
        ("gpu_1.lan:443", "https://gpu_1.lan", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("LOCALHOST:8000", "http://localhost:8000", True),
        ("127.0.0.1:8000", "http://127.0.0.1:8001", False),
        ("127.0.0.1:8000", "http://127.0.0.1", False),
        ("127.0.0.1:8000", "http://localhost:8000", False),
        ("127.0.0.1:443", "http://127.0.0.1", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8000.evil.example", False),
        ("127.0.0.1:8000", "http://user@127.0.0.1:8000", False),
        ("127.0.0.1:8000", "http://127.0.0.1:8000/", False),
        ("127.0.0.1:8000", "ftp://127.0.0.1:8000", False),
        ("127.0.0.1:8000", "127.0.0.1:8000", False),
        *(
            ("127.0.0.1:8000", origin, False)
            for origin in ("null", "", "http://[", "http://", "://", "http://[::1", "*")
        ),
        ("127.0.0.1:8000", CHAT, False),
    ],
)
@pytest.mark.parametrize("names", [NAMES, None])
def test_a_page_is_of_this_server_if_its_origin_is_the_one_that_was_asked(
    names: tuple[str, ...] | None, host: str, origin: str, *, is_own: bool
) -> None:
    headers = [("Host", host), ("Origin", origin)]
    assert judge(BrowserRules(names), *headers) is (None if is_own else ORIGIN)
    assert judge(BrowserRules(names, [CHAT]), *headers) is (None if is_own or origin == CHAT else ORIGIN)
    assert judge(BrowserRules(names, ["*"]), *headers) is None


@pytest.mark.parametrize("allowed", [CHAT, "http://[::1]:3000", "chrome-extension://abcdefgh", "app://localhost"])
def test_an_origin_that_is_allowed_is_itself_and_nothing_like_it(allowed: str) -> None:
    rules = BrowserRules(NAMES, [allowed])
    assert rules.allows(allowed)
    scheme, _, host = allowed.partition("://")
    near = [
        f"x{allowed}",
        f"{allowed}x",
        f"{allowed}.evil.example",
        f"{scheme}://x.{host}",
        f"{allowed}/",
        f"{allowed}:1",
    ]
    for origin in (*near, f"evil://{host}", "null", "", host):
        assert not rules.allows(origin), origin
        assert judge(rules, ("Host", "localhost"), ("Origin", allowed), ("Origin", origin)) is ORIGIN


@pytest.mark.parametrize("site", ["cross-site", "same-site", "same-origin", "none", None])
@pytest.mark.parametrize("origin", [None, "http://localhost:8000", CHAT, "https://evil.example", "null"])
@pytest.mark.parametrize("allowed", [(), (CHAT,), ("*",)])
def test_what_is_said_of_the_site_never_lets_anybody_in(
    allowed: tuple[str, ...], origin: str | None, site: str | None
) -> None:
    """Cross-site is refused unless an allowed origin is named, and a foreign origin whatever the site is."""
    headers = [("Host", "localhost:8000"), *([("Origin", origin)] if origin is not None else [])]
    headers += [("Sec-Fetch-Site", site)] if site is not None else []
    is_allowed = "*" in allowed or origin in allowed
    is_foreign = origin not in (None, "http://localhost:8000") or site == "cross-site"
    assert judge(BrowserRules(NAMES, allowed), *headers) is (ORIGIN if is_foreign and not is_allowed else None)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("https://Chat.Example", CHAT),
        ("https://chat.example:443", CHAT),
        ("http://chat.example:443", "http://chat.example:443"),
        ("http://[::1]:80", "http://[::1]"),
        ("tauri://localhost", "tauri://localhost"),
        ("https://chat.example/", None),
        ("https://*.example", None),
        ("chat.example", None),
        ("null", None),
        ("", None),
    ],
)
def test_origins_of_the_settings_are_written_as_browsers_write_them(text: str, normal: str | None) -> None:
    assert normal_origin(text) == normal
    if normal is not None:
        assert check_origin(text) == normal
        return
    with pytest.raises(ValueError, match=r"is no origin \(allowed: scheme://host or scheme://host:port, or \*\)"):
        check_origin(text)


def test_names_of_the_settings_are_names() -> None:
    assert check_host_name("GPU_1.lan.") == "gpu_1.lan"
    for text in ("", "a:8000", "http://a", "*", ".lan", "a..b", "a b", "[::1]"):
        with pytest.raises(ValueError, match="is no host name"):
            check_host_name(text)


def test_everybodys_pages_need_keys() -> None:
    with pytest.raises(StartupError, match=r"--allow-origin '\*' without keys .*--api-keys-file"):
        check_everybody([CHAT, "*"], has_keys=False)
    check_everybody(["*"], has_keys=True)
    check_everybody([CHAT], has_keys=False)
