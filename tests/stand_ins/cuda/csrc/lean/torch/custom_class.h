// Instead of torch's header of the same name, which c10d includes for the base class of its objects: the rest of it, the
// registration of classes for TorchScript, takes a fifth of the compile time.
#pragma once

#include <ATen/core/ivalue.h>
