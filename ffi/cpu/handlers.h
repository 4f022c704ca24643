// The XLA FFI handlers of ffi/abi.h for the CPU.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace wonly::cpu {

XLA_FFI_Error* matmul_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* ragged_matmul_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* matmul_transposed_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* ragged_matmul_transposed_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* quantize_handler(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* dequantize_handler(XLA_FFI_CallFrame* call_frame);

}  // namespace wonly::cpu
