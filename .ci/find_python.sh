# Prints the first interpreter of version $1 that runs.
find_python() {
  local candidate
  for candidate in "python$1" python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python3; do
    if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
      command -v "$candidate"
      return
    fi
  done
}
