// Replaces torch's header of the same name, which declares all 1,300 operators and takes a third of the compile time. It
// includes only what the stand-in and its headers call. AT_PER_OPERATOR_HEADERS does the same for the other headers.
#pragma once

#include <ATen/Context.h>
#include <ATen/DeviceGuard.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
