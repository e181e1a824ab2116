#include "arithmetic/codecs/codec.h"

namespace horovodish {

namespace {
constexpr std::array<const BlockCodec*, 6> kCodecs{&kInt8Codec,    &kInt4Codec, &kOnebitCodec,
                                                   &kTernaryCodec, &kTopkCodec, &kRandomkCodec};
static_assert(kCodecs.size() + 2 == kCodecNames.size());
}  // namespace

Codec::Codec(CodecKind kind, double share) : codec_(*kCodecs.at(static_cast<size_t>(kind) - 1)), share_(share) {}

}  // namespace horovodish
