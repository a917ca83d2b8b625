// Links that Python has opened and connected, until their groups take them.
#pragma once

#include <cstdint>
#include <memory>

#include "../core/link.h"

namespace hvkeras::ucx {

// The connected link of a group. Throws Failure if there is none.
std::unique_ptr<Link> take_link(int64_t group);

}  // namespace hvkeras::ucx
