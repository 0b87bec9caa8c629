"""Which page holds what: allocation, sharing by prefix, eviction. The tensors are `specdec.models.kv_pool`'s."""

from specdec.kv_cache.kv_cache_manager import KvCacheManager
from specdec.kv_cache.page_key import PAGE_SIZE, pages_for
from specdec.kv_cache.prefix_hit import PrefixHit

__all__ = ["PAGE_SIZE", "KvCacheManager", "PrefixHit", "pages_for"]
