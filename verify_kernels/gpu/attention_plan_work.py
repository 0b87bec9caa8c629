"""What a work item of tree attention is: the fields of its record, and the header of the work list.

A row's keys are cut at absolute positions, whatever the batch: tiles of 64 (a page), segments of SEG_TILES tiles,
blocks of FOLD_SEGS segments. A row at position p has tiles 0 .. p // 64; the last one, which ends at the row itself,
stands alone, the others form segments. Within a segment tiles are added to one running softmax; segments are folded
into their block in order, blocks are summed in order, the last tile comes last. All of it follows from p alone, so a
tree node, a prefill row and a plainly decoded row of one text get the same bits.

A work item adds up one stretch of that for a tile of rows:

- whole committed pages, shared by all rows of an entry: a segment of them, or, in coarse plans, a block folded in
  registers (which are the same bits, since folding is the same everywhere);
- of the rows of one leaf path that end in the same tile: that last tile, or a segment with tiles that rows of this
  step fill. Their keys are gathered in path order, so that every key is in the lane of its position. An entry's list
  begins with these: they are chains of dependent loads, which nothing would hide at the end.

Partial results of a row lie in units: 0 is the last tile, 1 + i the i-th stretch of committed pages; segments of the
leaf path follow (after the short stretch at the end of the committed pages, of which their rows make no use).
"""

from __future__ import annotations

import triton.language as tl

WORK_FIELDS = tl.constexpr(16)
ENTRY = tl.constexpr(0)
START = tl.constexpr(1)  # first row of the entry
CONTEXT = tl.constexpr(2)  # its slots that were filled before this step
NODE_FIRST = tl.constexpr(3)  # rows of the tile: nodes [first, stop) of the path, that is depths, or rows of the entry
NODE_STOP = tl.constexpr(4)
TILE_FIRST = tl.constexpr(5)  # tiles [first, stop) are read as pages
TILE_STOP = tl.constexpr(6)
GATHER_STOP = tl.constexpr(7)  # tiles [stop, gather stop) are gathered; 0: none
LEAF = tl.constexpr(8)  # row of the entry whose path this is
LEAF_DEPTH = tl.constexpr(9)
DIVERGE = tl.constexpr(10)  # first depth of the path whose slot is not its position
UNIT = tl.constexpr(11)

HEADER_FIELDS = tl.constexpr(4)  # work items, units of a row, coarse or not; one to spare
NEVER = tl.constexpr(1 << 30)
