#!/bin/sh
# The kernels on 64-bit Arm, emulated: whether they are right and give x86's bits. It says nothing about speed.
#
#     tests/arm.sh [FOLDER]        an hour on one core; FOLDER (/tmp/arm) holds Python and torch, 1.3 GB
#
# Needs Debian or Ubuntu with qemu-user-static, and pip.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
root=${1:-/tmp/arm}

if [ ! -d "$root/site/torch" ]; then
    mkdir -p "$root/apt/lists/partial" "$root/apt/archives/partial" "$root/root/proc" "$root/home"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian bookworm main" \
        > "$root/sources.list"
    apt="apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State=$root/apt
        -o Dir::State::status=/dev/null -o Dir::Cache=$root/apt -o Dir::Etc::sourcelist=$root/sources.list
        -o Dir::Etc::sourceparts=/dev/null -o Debug::NoLocking=1"
    $apt update
    $apt install -y --no-install-recommends --download-only python3 libstdc++6
    for package in "$root"/apt/archives/*.deb; do dpkg-deb -x "$package" "$root/root"; done
    # LLVM reads the processor's name here, which the emulator does not write.
    printf 'processor\t: 0\nFeatures\t: fp asimd aes sha1 sha2 crc32 atomics asimddp\nCPU implementer\t: 0x41\n%s\n' \
        'CPU part	: 0xd40' > "$root/root/proc/cpuinfo"
    pip="python3 -m pip install -q --target $root/site --python-version 3.11 --implementation cp
        --only-binary=:all: --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64
        --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64"
    # Later wheels of torch for Arm need CUDA's libraries.
    $pip --no-deps torch==2.10.0
    $pip "transformers>=5.16.1,<5.24" gguf numba scipy jinja2 typer rich filelock sympy networkx fsspec \
        typing_extensions setuptools pytest pytest-timeout pytest-xdist hypothesis
fi

# Under its own name, so that a test that starts Python starts the emulator.
cat > "$root/python" <<END
#!/bin/sh
exec qemu-aarch64-static -0 "\$0" -cpu max -L "$root/root" -E PYTHONHOME="$root/root/usr" -E HOME="$root/home" \\
    -E PYTHONPATH="$here/src:$here:$root/site" -E PYTHONDONTWRITEBYTECODE=1 "$root/root/usr/bin/python3" "\$@"
END
chmod +x "$root/python"

cd "$here"
run() { "$root/python" -m pytest -n 0 -p no:cacheprovider --timeout 3000 "$@"; }
run tests/target/test_products.py -k "same_bits or ((dotprod or float32) and (alone or rounded_once))"
run tests/test_hashes.py tests/target/test_exact.py -k "every_processor or every_level or (chains and dtype0) or number_of_rows"
run tests/target/test_kernels.py tests/target/test_program.py tests/test_processor.py
run tests/target/test_gguf.py -k "says_what_its_folder or mixed_kinds or not_multiplied or facts_and"
run tests/test_lossless_quantised.py -k "greedy_text or (exact_answers and int4 and oracle)"
