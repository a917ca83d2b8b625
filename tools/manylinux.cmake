# Toolchain for every Linux with glibc 2.28 or later, with Zig from the wheel `ziglang`, also for other processors:
#   cmake -DCMAKE_TOOLCHAIN_FILE=tools/manylinux.cmake -DMACHINE=aarch64 ...
# The first Python in the PATH must have that wheel. docs/decisions/packaging.md gives the reasons.
set(MACHINE "${CMAKE_HOST_SYSTEM_PROCESSOR}" CACHE STRING "target processor: x86_64 or aarch64")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MACHINE ZIG)
if(NOT ZIG)
  execute_process(
    COMMAND python -c "import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).with_name('zig'))"
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "The first python in the PATH must have the wheel ziglang. HINT: pip install ziglang.")
  endif()
  set(ZIG "${found}" CACHE FILEPATH "the compiler")
endif()
# Test programs are not linked: for the first program of a target, Zig would compile the whole C++ standard library.
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
set(CMAKE_C_ARCHIVE_CREATE "${ZIG} ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_CREATE "${CMAKE_C_ARCHIVE_CREATE}")
set(CMAKE_C_ARCHIVE_FINISH "")
set(CMAKE_CXX_ARCHIVE_FINISH "")
set(CMAKE_C_COMPILER "${ZIG};cc;-target;${MACHINE}-linux-gnu.2.28")
set(CMAKE_CXX_COMPILER "${ZIG};c++;-target;${MACHINE}-linux-gnu.2.28")
if(NOT MACHINE STREQUAL CMAKE_HOST_SYSTEM_PROCESSOR)
  set(CMAKE_SYSTEM_NAME Linux)
  set(CMAKE_SYSTEM_PROCESSOR "${MACHINE}")
endif()
