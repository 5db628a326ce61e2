"""The results database: written from journal records, read by queries and reporting views."""

from orchestrator.database_url import StoreError, StoreUnavailable
from orchestrator.store.engine import upgrade
from orchestrator.store.store import Store

__all__ = ["Store", "StoreError", "StoreUnavailable", "upgrade"]
