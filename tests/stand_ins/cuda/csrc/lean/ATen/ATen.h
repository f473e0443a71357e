// Instead of torch's header of the same name, which declares all 1,300 operators and takes a third of the compile time:
// only what the stand-in and the headers that it includes call. With AT_PER_OPERATOR_HEADERS the others do the same.
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
