// Copies rows of bytes past the caches: the lines they land in are not read first, and none that
// are in use elsewhere make room for them.
//
// Four rows at once: a core waits for several lines of memory in the time of one, but what fetches
// ahead of a single row stops at the end of its page.

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t kLine = 64, kLanes = 4;

struct Rows {
    uint8_t* to;
    const uint8_t* from;
    size_t to_step, from_step;  // bytes from one row to the next
    size_t row_bytes, num_rows;
};

inline void stream_line(uint8_t* to, const uint8_t* from) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kLine / 2));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kLine / 2), high);
}

template <size_t lanes>
void stream_rows(const Rows& rows, size_t first) {
    uint8_t* to = rows.to + first * rows.to_step;
    const uint8_t* from = rows.from + first * rows.from_step;
    for (size_t at = 0; at < rows.row_bytes; at += kLine) {
        for (size_t lane = 0; lane < lanes; ++lane) {
            stream_line(to + lane * rows.to_step + at, from + lane * rows.from_step + at);
        }
    }
}

// Whether each row is whole lines where it lands.
bool is_whole_lines(const Rows& rows) {
    return (reinterpret_cast<uintptr_t>(rows.to) | rows.to_step | rows.row_bytes) % kLine == 0;
}

void copy(const Rows& rows) {
    size_t row = 0;
    if (is_whole_lines(rows)) {
        for (; row + kLanes <= rows.num_rows; row += kLanes) stream_rows<kLanes>(rows, row);
        for (; row < rows.num_rows; ++row) stream_rows<1>(rows, row);
    }
    for (; row < rows.num_rows; ++row) {
        std::memcpy(rows.to + row * rows.to_step, rows.from + row * rows.from_step, rows.row_bytes);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void relevo_copy_rows(const Rows* list,
                                                                        size_t length) {
    for (size_t i = 0; i < length; ++i) copy(list[i]);
    _mm_sfence();  // whoever is told that they are there finds them
}
