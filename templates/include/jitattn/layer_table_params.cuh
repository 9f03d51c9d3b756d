// The launch argument of the kernel that makes the tables of a group's layers. Twin:
// jitattn/kernels/pages/params.py.
#pragma once

#include "jitattn/types.cuh"

namespace jitattn {

// A request, and what the host has changed of it.
struct TableRequest {
  int32_t row;            // of the slots
  int32_t table_row;      // of the tables
  int32_t scratch_start;  // the blocks in scratch, none from scratch_stop on
  int32_t scratch_stop;
  int32_t scratch_begin;  // its first scratch slot
  int32_t change_begin;   // its changes, of rising blocks, before change_end
  int32_t change_end;
};

// The slot that a block has from now on.
struct SlotChange {
  int32_t block;
  int32_t slot;
};

// Page of a layer in a slot, and pages of a slot.
struct TableLayer {
  int32_t num_pages;
  int32_t offset;
};

struct LayerTablesParams {
  int32_t* tables;               // [num_layers, num_table_rows, width]
  int32_t* slots;                // [num_rows, num_blocks], -1: none; changes are written here
  const TableRequest* requests;  // [batch_size]
  const SlotChange* changes;     // [num_changes]
  const int32_t* scratch_slots;
  const TableLayer* layers;  // [num_layers]
  int64_t layer_stride;
  int64_t row_stride;
  int64_t column_stride;
  int32_t batch_size;
  int32_t num_layers;
  int32_t width;
  int32_t num_blocks;
  int32_t first_block;  // the columns before it are -1
  int32_t span;         // of blocks: the width, or more where changes reach further
};

}  // namespace jitattn
