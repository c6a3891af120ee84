// SHA-256 of the blocks of a prompt, each with the digest before it: a chain in one call. And, where
// Python's headers are, the bytes that are hashed from a list of its ints.
//
// The CPU's own SHA instructions; where it has none there is nothing to gain over a library's code.

#ifdef RELEVO_HAS_PYTHON
#include <Python.h>
#endif
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kDigest = 32, kChunk = 64;

alignas(16) constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// a b e f and c d g h of the initial state, highest first as the instructions want them.
const __m128i kFirst0 = _mm_set_epi32(0x6a09e667, static_cast<int>(0xbb67ae85), 0x510e527f,
                                      static_cast<int>(0x9b05688c));
const __m128i kFirst1 = _mm_set_epi32(0x3c6ef372, static_cast<int>(0xa54ff53a), 0x1f83d9ab,
                                      0x5be0cd19);
// Turns the bytes of each 32-bit word around.
const __m128i kSwap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);

void compress(__m128i& state0, __m128i& state1, const uint8_t* chunk) {
    __m128i words[4];
    for (int i = 0; i < 4; ++i) {
        const auto* from = reinterpret_cast<const __m128i*>(chunk) + i;
        words[i] = _mm_shuffle_epi8(_mm_loadu_si128(from), kSwap);
    }
    __m128i a = state0, b = state1;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
        __m128i& now = words[i % 4];
        const __m128i last = words[(i + 3) % 4];
        const auto* round = reinterpret_cast<const __m128i*>(kRounds) + i;
        const __m128i sum = _mm_add_epi32(now, _mm_load_si128(round));
        b = _mm_sha256rnds2_epu32(b, a, sum);
        a = _mm_sha256rnds2_epu32(a, b, _mm_shuffle_epi32(sum, 0x0e));
        if (i < 12) {
            now = _mm_sha256msg1_epu32(now, words[(i + 1) % 4]);
            now = _mm_add_epi32(now, _mm_alignr_epi8(last, words[(i + 2) % 4], 4));
            now = _mm_sha256msg2_epu32(now, last);
        }
    }
    state0 = _mm_add_epi32(state0, a);
    state1 = _mm_add_epi32(state1, b);
}

// Lowest word first, and each word's highest byte first: a digest as it is written.
void write_digest(__m128i state0, __m128i state1, uint8_t* out) {
    const __m128i feba = _mm_shuffle_epi32(state0, 0x1b);
    const __m128i dchg = _mm_shuffle_epi32(state1, 0xb1);
    const __m128i low = _mm_blend_epi16(feba, dchg, 0xf0);
    const __m128i high = _mm_alignr_epi8(dchg, feba, 8);
    auto* to = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(to, _mm_shuffle_epi8(low, kSwap));
    _mm_storeu_si128(to + 1, _mm_shuffle_epi8(high, kSwap));
}

}  // namespace

// Writes a digest for each of `num_blocks` blocks of `block_bytes` to `out`. `scratch` has room for
// a digest, a block and its padding: 32 + block_bytes + 72 bytes.
extern "C" __attribute__((visibility("default"))) void relevo_hash_chain(
    const uint8_t* parent, const uint8_t* blocks, size_t block_bytes, size_t num_blocks,
    uint8_t* scratch, uint8_t* out) {
    const size_t length = kDigest + block_bytes;
    const size_t padded = (length + 9 + kChunk - 1) / kChunk * kChunk;
    std::memset(scratch + length, 0, padded - length);
    scratch[length] = 0x80;
    for (size_t i = 0; i < 8; ++i) {
        scratch[padded - 1 - i] = static_cast<uint8_t>(length * 8 >> (8 * i));
    }
    for (size_t number = 0; number < num_blocks; ++number) {
        std::memcpy(scratch, number ? out + (number - 1) * kDigest : parent, kDigest);
        std::memcpy(scratch + kDigest, blocks + number * block_bytes, block_bytes);
        __m128i state0 = kFirst0, state1 = kFirst1;
        for (size_t start = 0; start < padded; start += kChunk) {
            compress(state0, state1, scratch + start);
        }
        write_digest(state0, state1, out + number * kDigest);
    }
}

#ifdef RELEVO_HAS_PYTHON

namespace {

// Small ints, which all token ids are, without a call: 10 us for 8,192 of them instead of 60.
inline bool read_small(PyObject* item, uint32_t& value) {
    if (!PyLong_CheckExact(item)) return false;
    const auto* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030c0000
    if (!PyUnstable_Long_IsCompact(number)) return false;
    const Py_ssize_t found = PyUnstable_Long_CompactValue(number);
    value = static_cast<uint32_t>(found);
    return found >= 0;
#else
    value = number->ob_digit[0];
    return Py_SIZE(number) == 1;
#endif
}

// The others: 0, large ones, and what is no 32-bit number, for which Python raises.
bool read_any(PyObject* item, uint32_t& value) {
    PyObject* number = PyNumber_Index(item);
    if (!number) return false;
    const unsigned long found = PyLong_AsUnsignedLong(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) return false;
    if (found > UINT32_MAX) PyErr_SetString(PyExc_OverflowError, "a token id has over 32 bits");
    value = static_cast<uint32_t>(found);
    return found <= UINT32_MAX;
}

}  // namespace

// The bytes of a list's ints, 4 of each, lowest first; null with an exception set for other things.
extern "C" __attribute__((visibility("default"))) PyObject* relevo_pack_tokens(PyObject* list) {
    const Py_ssize_t num_tokens = PyList_GET_SIZE(list);
    PyObject* packed = PyBytes_FromStringAndSize(nullptr, num_tokens * sizeof(uint32_t));
    if (!packed) return nullptr;
    char* to = PyBytes_AS_STRING(packed);
    for (Py_ssize_t i = 0; i < num_tokens; ++i, to += sizeof(uint32_t)) {
        PyObject* item = PyList_GET_ITEM(list, i);
        uint32_t value;
        if (!read_small(item, value) && !read_any(item, value)) {
            Py_DECREF(packed);
            return nullptr;
        }
        std::memcpy(to, &value, sizeof(value));
    }
    return packed;
}

#endif
