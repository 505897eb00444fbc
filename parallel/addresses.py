"""Addresses of hosts, and listeners at one address alone; without torch."""

import socket


def listen_at(host: str, port: int = 0) -> socket.socket:
    """A listener at one address; raises OSError as `serve_store` does."""
    address = address_of(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family)


def address_of(name: str) -> str:
    """IP address of a host: of IPv4, unless it has only others. OSError for an unknown name."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    _, _, _, _, place = min(found, key=lambda each: each[0] != socket.AF_INET)
    return str(place[0])
