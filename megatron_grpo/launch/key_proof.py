"""Shows over an unencrypted connection that one knows a secret key, without sending it."""

import hashlib
import hmac


def proof(key: str, challenge: str, rank: int) -> str:
    """The answer to a challenge, which requires the key."""
    return hmac.new(key.encode(), f"{challenge} {rank}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: str, key: str, challenge: str, rank: int) -> bool:
    """Whether the answer of `rank` to a challenge shows that it knows the key."""
    return hmac.compare_digest(given.encode(), proof(key, challenge, rank).encode())
