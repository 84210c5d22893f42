"""Calls of workers at a server: many under way at once, replies in any order, each handed over exactly once."""

from __future__ import annotations

from colossus.server.messages import Call, Refused, Reply, Request, ServerGone
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer

__all__ = ["Call", "Refused", "Reply", "Request", "RpcClient", "RpcServer", "ServerGone"]
