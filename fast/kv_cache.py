"""Keys and values of committed prefixes, and of the tree of continuations that grows beside one of them.

    keys, values            [layers, rows, kv heads, capacity, head dim]    one row per sequence
    lengths                 [rows]                                          valid positions of each row
    node_keys, node_values  [layers, nodes, kv heads, head dim]             tree nodes, stored once each; the last
                                                                            place is scratch, for padding rows
    ancestors               [nodes, depth]                                  each node's path, itself last; -1 = none

A tree hangs on a cache of one row: all its nodes attend to that row's prefix, which is stored once, and to
their own few ancestors, which are gathered.  A batch of sequences uses the rows alone, each with its own length.
Tests: `tests/test_kv_cache.py`.
"""

import torch


class KVCache:
    """Storage only; `fast/decoder.py` attends to it.

    Args: config; rows, how many sequences; capacity, positions per sequence.
    """

    def __init__(self, config, rows, capacity, *, dtype, device):
        shape = (config.num_layers, rows, config.num_kv_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.nodes = 0
        self.node_keys = self.node_values = self.keys.new_zeros((config.num_layers, 1, *shape[2::2]))
        self.ancestors = torch.empty((0, 0), dtype=torch.int64, device=device)

    @property
    def capacity(self):
        return self.keys.shape[3]

    def places(self, rows, positions):
        """Where `write` puts the key/value heads of positions int [n, T] of rows int [n, 1]: int [n * T * kv heads].

        ValueError for positions beyond the capacity, which would be another row's; it is not looked for on CUDA.
        """
        heads, capacity = self.keys.shape[2:4]
        if not positions.is_cuda and positions.numel() and int(positions.max()) >= capacity:
            raise ValueError(f"position {int(positions.max())} is beyond the cache's {capacity} positions")
        head = torch.arange(heads, device=rows.device)
        return ((rows[..., None] * heads + head) * capacity + positions[..., None]).flatten()

    def write(self, layer, places, keys, values):
        """Put keys and values [n * T, kv heads, d] of one layer where `places` says."""
        for cache, new in ((self.keys, keys), (self.values, values)):
            cache[layer].view(-1, cache.shape[-1]).index_copy_(0, places, new.flatten(0, 1))

    def add_nodes(self, parents):
        """Make room for one node per parent (-1: the prefix): (their ids [n], their ancestors [n, depth])."""
        new = self.nodes + torch.arange(len(parents), device=parents.device)
        if self.nodes + len(parents) >= self.node_keys.shape[1]:
            room = max(self.nodes, len(parents), 256)
            pad = (0, 0, 0, 0, 0, room)
            self.node_keys = torch.nn.functional.pad(self.node_keys, pad)
            self.node_values = torch.nn.functional.pad(self.node_values, pad)
        none = torch.full((1, self.ancestors.shape[1]), -1, dtype=torch.int64, device=parents.device)
        path = torch.cat([self.ancestors, none])[parents]
        path = torch.cat([path, new[:, None]], dim=1)
        self.ancestors = torch.cat([torch.nn.functional.pad(self.ancestors, (1, 0), value=-1), path])
        self.nodes += len(parents)
        return new, path

    def keep(self, rows):
        """Keep only these sequences, in this order (finished answers leave a batch)."""
        self.keys, self.values, self.lengths = self.keys[:, rows], self.values[:, rows], self.lengths[rows]

    def move(self, source, row, length):
        """Copy the first `length` positions of one row over another's."""
        for cache in (self.keys, self.values):
            cache[:, row, :, :length] = cache[:, source, :, :length]
