#!/bin/sh
# Stands in for nvcc where only the cache is tested. Notes each compilation in $FAKE_NVCC_LOG; the machine code that it
# writes is the source itself. Sources say what should go wrong.
if [ "$1" = --version ]; then
  echo "Build fake ${FAKE_NVCC_VERSION:-1}"
  exit 0
fi
while [ $# -gt 0 ]; do
  case "$1" in
    -o) target=$2; shift ;;
  esac
  source=$1
  shift
done
[ -n "$FAKE_NVCC_LOG" ] && echo "$target" >> "$FAKE_NVCC_LOG"
if grep -q "be slow" "$source"; then sleep 0.5; fi
if grep -q "be wrong" "$source"; then
  echo "kernel.cu(1): error: that is wrong"
  exit 2
fi
if grep -q "be killed" "$source"; then kill -9 $$; fi
cp "$source" "$target"
