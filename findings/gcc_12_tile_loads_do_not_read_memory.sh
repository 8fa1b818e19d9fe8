#!/usr/bin/env bash
# Expected: `_tile_loadd(tile, pointer, stride)` of <immintrin.h> reads 16 rows from memory, so what was
# written there before it is written before it. Other load intrinsics are like that, and Intel's
# documentation of this one says it loads.
# What happens: in gcc 12 it is an `asm volatile` with the pointer in a register, no memory operand and
# no "memory" clobber. To the compiler it reads nothing: a buffer that is filled, loaded and filled
# again loses its first filling as a dead store, from -O1 on, and the tile gets whatever lay there.
# `_tile_stored` does have the clobber, and hides the fault wherever a buffer is filled only once. A
# fence for the compiler before each load, std::atomic_signal_fence, cures it. -O0 is right.
# Version: gcc 12.2.0 (Debian 12). Read in amxtileintrin.h: _tile_loadd_internal. Only compiled: no AMX
# is needed. Exits with 2 where gcc is of another major version, which may be right.
# Seen:
#   gcc 12.2.0
#   -O1: tileloadd fill-2 tileloadd
#   -O1, a fence before each load: fill-1 tileloadd fill-2 tileloadd
#   -O2: tileloadd fill-2 tileloadd
#   -O2, a fence before each load: fill-1 tileloadd fill-2 tileloadd
#   -O3: tileloadd fill-2 tileloadd
#   -O3, a fence before each load: fill-1 tileloadd fill-2 tileloadd
set -euo pipefail

if ! version=$(gcc -dumpfullversion) || [ "${version%%.*}" != 12 ]; then
  echo "needs gcc 12, found ${version:-none}" >&2
  exit 2
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cat >tiles.c <<'C'
#include <immintrin.h>

#ifdef FENCE
#define WRITTEN() __asm__ volatile("" ::: "memory")
#else
#define WRITTEN()
#endif

int sums[256];

void product(void) {
  _Alignas(64) signed char block[1024];
  __builtin_memset(block, 1, sizeof block);
  WRITTEN();
  _tile_loadd(1, block, 64);
  __builtin_memset(block, 2, sizeof block);
  WRITTEN();
  _tile_loadd(2, block, 64);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, 64);
}
C

fillings() { # of the two constants, eight bytes of 1 and eight of 2, those that the code writes
  gcc -mamx-tile -mamx-int8 -S -o - "$@" tiles.c |
    grep -oE 'tileloadd|72340172838076673|144680345676153346' |
    sed -e 's/72340172838076673/fill-1/' -e 's/144680345676153346/fill-2/' | tr '\n' ' '
}

echo "gcc $version"
for level in -O1 -O2 -O3; do
  plain=$(fillings $level)
  fenced=$(fillings $level -DFENCE)
  echo "$level: $plain"
  echo "$level, a fence before each load: $fenced"
  [ "$fenced" = "fill-1 tileloadd fill-2 tileloadd " ] || { echo "the fenced code has changed" >&2; exit 1; }
  [ "$plain" = "tileloadd fill-2 tileloadd " ] || { echo "the first filling is there now" >&2; exit 1; }
done
