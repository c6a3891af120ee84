"""The commands' own view of a running cluster: its HTTP front, and errors in one line."""

import ssl
from typing import Any

import httpx

CONNECT_WITHIN_S = 5.0
ANSWER_WITHIN_S = 600.0


class FrontError(RuntimeError):
    """The cluster could not be asked; the message is one line for the person who asked."""


def open_client(url: str, *, api_key: str) -> httpx.Client:
    """A client for the front at `url`."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(ANSWER_WITHIN_S, connect=CONNECT_WITHIN_S)
    return httpx.Client(
        base_url=url.rstrip("/"),
        headers=headers,
        timeout=timeout,
        # Whom the system trusts; a CA of one's own is named by SSL_CERT_FILE.
        verify=ssl.create_default_context() if url.startswith("https:") else False,
        trust_env=False,  # proxies of the environment are for the outside, not for the cluster
    )


def get_json(client: httpx.Client, path: str) -> Any:
    """Fetch one document; FrontError says why not."""
    try:
        response = client.get(path)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise not_reached(client, error) from error
    raise_for_error(response)
    return response.json()


def raise_for_error(response: httpx.Response) -> None:
    """FrontError with the server's own words; the body must have been read."""
    if response.is_success:
        return
    try:
        reason = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        reason = response.text[:200] or response.reason_phrase
    raise FrontError(f"{response.status_code} from {response.url}: {reason}")


def not_reached(client: httpx.Client, error: Exception) -> FrontError:
    """The error for a front that does not answer."""
    return FrontError(
        f"nothing answers at {client.base_url}: {error}"
        " (is `relevo serve` running there? --url names another place)"
    )
